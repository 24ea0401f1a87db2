"""`check_vjp`: prove a gradient rule. Public, for whoever writes one."""

from orttrainer.testing.check import Case, Fixed, check_gradient, check_vjp, evaluate

__all__ = ["Case", "Fixed", "check_gradient", "check_vjp", "evaluate"]
