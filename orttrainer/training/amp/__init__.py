"""Loss scaling for mixed precision in float16."""

from orttrainer.training.amp import loss_scaler
from orttrainer.training.amp.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler", "loss_scaler"]
