"""The legacy optimizers once more, in other people's PyTorch where there is some: what the training graphs are compared with."""

from __future__ import annotations

import math

import torch
import torch_optimizer


class SGD:
    """w <- w - lr g."""

    def __init__(self, parameters, lr):
        self.optimizer = torch.optim.SGD(list(parameters.values()), lr=lr)

    def step(self):
        self.optimizer.step()


class ClippedOptimizer:
    """Divides all gradients by max(1, global norm / 1) before the update, as legacy Adam and LAMB do."""

    def __init__(self, parameters, lr, clip=True):
        self.parameters, self.lr, self.clip = dict(parameters), lr, clip

    def step(self):
        if self.clip:
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
            for gradient in gradients if norm > 1 else []:
                gradient.div_(norm)
        with torch.no_grad():
            self.update()


class AdamBefore(ClippedOptimizer):
    """Adam, decay mode 0: torch.optim.AdamW with one weight decay for each parameter."""

    def __init__(self, parameters, lr, decay, epsilon=1e-8, clip=True):
        super().__init__(parameters, lr, clip)
        groups = [{"params": [p], "weight_decay": decay(name)} for name, p in self.parameters.items()]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, eps=epsilon)

    def update(self):
        self.optimizer.step()


class AdamAfter(ClippedOptimizer):
    """Adam, decay mode 1, as transformers' AdamW was: the correction on the step size, the decay after the update."""

    def __init__(self, parameters, lr, decay, epsilon=1e-8, clip=True):
        super().__init__(parameters, lr, clip)
        self.decay, self.epsilon, self.t = decay, epsilon, 0
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.parameters.items()}

    def update(self):
        self.t += 1
        for name, p in self.parameters.items():
            m, v = self.moments[name]
            m.lerp_(p.grad, 0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            step = self.lr * (1 - 0.999**self.t) ** 0.5 / (1 - 0.9**self.t)
            p.sub_(step * m / (v.sqrt() + self.epsilon))
            p.sub_(self.lr * self.decay(name) * p)


class Lamb(ClippedOptimizer):
    """torch-optimizer's LAMB without its bound on the weight norm: no bias correction, as the legacy front end built it."""

    def __init__(self, parameters, lr, decay, epsilon=1e-6, clip=True):
        super().__init__(parameters, lr, clip)
        groups = [{"params": [p], "weight_decay": decay(name)} for name, p in self.parameters.items()]
        self.optimizer = torch_optimizer.Lamb(groups, lr=lr, eps=epsilon, clamp_value=math.inf)

    def update(self):
        self.optimizer.step()
