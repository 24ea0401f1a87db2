"""One class for each thing that a caller can cause. All derive from `OrtTrainerError`."""


class OrtTrainerError(Exception):
    """Base of every error that `orttrainer` raises on purpose."""


class SchemaError(OrtTrainerError, ValueError, AssertionError):
    """A tensor, or a description of one, does not match what the model declares; legacy refused most with an assert."""


class InvalidArgumentError(OrtTrainerError, ValueError):
    """An argument has a value that cannot be used; the text says which can."""


class SettingError(InvalidArgumentError, AssertionError):
    """A setting that the second generation refused with a bare assert; scripts may catch that."""


class UnsupportedFeatureError(OrtTrainerError, NotImplementedError):  # the base that legacy raised; no stub
    """A legacy argument whose feature this version does not have; the text says what to do instead."""


class UnsupportedImportError(ImportError, UnsupportedFeatureError):
    """A module or name of legacy that this package does not have was imported; the text says what to do instead."""


class ModelError(OrtTrainerError, ValueError):
    """An ONNX model that cannot be trained as it is: no loss, unknown names, broken graph."""


class UnknownNameError(SchemaError, ModelError, RuntimeError):
    """A name that the user gave, of an input, output or weight, which the model does not have."""


class ExportError(OrtTrainerError, RuntimeError):
    """A torch module could not be turned into an ONNX graph."""


class ExportMismatchError(ExportError):
    """The exported graph does not compute what the module computes; the text says what differs."""


class UnsupportedModelError(ExportError):
    """The module uses something that has no faithful ONNX form; the text names it."""


class GradientError(OrtTrainerError, RuntimeError):
    """A gradient was asked for that does not exist, or a rule returned something malformed."""


class MissingGradientError(GradientError):
    """An operator between a parameter and the loss has no gradient rule."""


class OptimizerError(OrtTrainerError, ValueError):
    """An unknown optimizer, or an optimizer attribute that it does not have."""


class StateError(OrtTrainerError, RuntimeError):
    """A state dict does not fit the trainer: missing, unexpected or misshapen entries."""


class CheckpointError(StateError, AssertionError):
    """Checkpoint files that do not belong to each other, or to the trainer: legacy refused them with an assert."""


class RuntimeNotFoundError(OrtTrainerError, ImportError):
    """No usable ONNX Runtime, or one without the execution provider that was asked for."""


class ExecutionError(OrtTrainerError, RuntimeError):
    """ONNX Runtime refused or failed to run the training graph; its own text is chained."""


class NonFiniteLossError(ExecutionError):
    """The loss is NaN or inf, and the trainer was asked to make an error of it; nothing was updated."""


class DistributedError(OrtTrainerError, RuntimeError):
    """The ranks of a data-parallel run cannot work together; the text says why."""


class DescriptionMismatchWarning(UserWarning):
    """What a `ModelDescription` declares differs from the tensors of the first batch."""


class NoGradientWarning(UserWarning):
    """A parameter has no path to the loss, so training leaves it as it is."""


class NonFiniteLossWarning(UserWarning):
    """The loss is NaN or inf; said once until it is finite again."""
