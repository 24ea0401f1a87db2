"""Hugging Face models with their own loss: tiny random configurations of each architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import reference_optimizers as reference
import torch
from torch import nn

from orttrainer.errors import OrtTrainerError
from suites.outcome import Outcome, State
from suites.training import CountedDropouts, Job, dropouts_of, failed

TITLE = "Hugging Face models"
TARGET = "every architecture trains step for step like PyTorch (10 steps of Adam), with every dropout that it has"
SLICE = 1
# What cannot be exported is listed as such, and no fault: Switch loops over the experts that were hit, Wav2Vec2 selects
# its CTC labels by value. A state-space model loops over the length in Python, so that it has one length here.
EXCEPTIONS: dict[str, str] = {}

STEPS, RATE = 10, 3e-3
TOLERANCE = 1e-4  # of the loss
# Adam divides by sqrt(v) + epsilon. A gradient that is zero but for rounding (the bias of an attention key) would make
# noise over noise of its update, in PyTorch too.
EPSILON = 1e-6

VOCABULARY, LENGTH, IMAGE, CLASSES = 61, 10, 32, 5
BOTH, EAGER, NO_ATTENTION = ("sdpa", "eager"), ("eager",), ("",)


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step % 2)  # two batches, so that there is something to learn


# ---------------------------------------------------------------- batches


def _tokens(step: int, length: int, classes: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, classes, (3, length), generator=_generator(step))


def _padding(length: int) -> torch.Tensor:
    """The attention mask of a batch whose last row is shorter than the others."""
    mask = torch.ones(3, length, dtype=torch.int64)
    mask[-1, length - 3 :] = 0
    return mask


def _language(step):
    tokens, mask = _tokens(step, LENGTH), _padding(LENGTH)
    return [torch.where(mask > 0, tokens, 1), mask, torch.where(mask > 0, tokens, -100)]


def _detection(step):
    tokens, mask = _tokens(step, LENGTH), _padding(LENGTH)
    return [torch.where(mask > 0, tokens, 1), mask, (tokens % 2)]


def _answers(step):
    tokens, mask, _ = _language(step)
    places = torch.randint(0, LENGTH + 2, (2, 3), generator=_generator(step + 7))  # behind the end: no answer
    return [tokens, mask, *places]


def _translation(step):
    tokens, mask = _tokens(step, LENGTH), _padding(LENGTH)
    target = _tokens(step + 50, LENGTH - 2)
    target[-1, -2:] = -100
    return [torch.where(mask > 0, tokens, 1), mask, target]


def _labels(step, n=4):
    return torch.randint(0, CLASSES, (n,), generator=_generator(step + 7))


def _images(step):
    return [torch.randn(4, 3, IMAGE, IMAGE, generator=_generator(step)), _labels(step)]


def _maps(step):
    image = torch.randn(2, 3, IMAGE, IMAGE, generator=_generator(step))
    return [image, torch.randint(0, CLASSES, (2, IMAGE, IMAGE), generator=_generator(step + 7))]


def _videos(step):
    return [torch.randn(2, 2, 3, IMAGE, IMAGE, generator=_generator(step)), _labels(step, 2)]


def _spectrograms(step):
    return [torch.randn(3, 16, 24, generator=_generator(step)), _tokens(step, 6)]


def _spectrum_classes(step):
    return [torch.randn(3, 24, 16, generator=_generator(step)), _labels(step, 3)]


def _sounds(step):
    return [torch.randn(3, 800, generator=_generator(step)), _labels(step, 3)]


def _spoken(step):
    return [torch.randn(3, 800, generator=_generator(step)), _tokens(step, 4)]


def _series(step):
    return list(torch.randn(3, 40, 3, generator=_generator(step)).split([32, 8], 1))


def _pairs(step):
    return [*_language(step)[:2], torch.randn(3, 3, IMAGE, IMAGE, generator=_generator(step))]


def _boxes(step):
    """Two pictures, two things in each: what they are, and their boxes."""
    a, b = torch.rand(2, 2, 2, 2, generator=_generator(step))
    image = torch.randn(2, 3, IMAGE, IMAGE, generator=_generator(step))
    return [image, _labels(step).view(2, 2), torch.cat([(a + b) / 2, (a - b).abs()], -1)]


def _captions(step):
    tokens, mask, image = _pairs(step)
    return [tokens, mask, image, tokens]


_ROW = ["batch", "length"]
_IMAGE = ["batch", 3, IMAGE, IMAGE]
KINDS: dict[str, tuple[dict, Callable]] = {
    "language": ({"input_ids": _ROW, "attention_mask": _ROW, "labels": _ROW}, _language),
    "detection": ({"input_ids": _ROW, "attention_mask": _ROW, "labels": _ROW}, _detection),
    "answers": (
        {"input_ids": _ROW, "attention_mask": _ROW, "start_positions": ["batch"], "end_positions": ["batch"]},
        _answers,
    ),
    "unmasked": ({"input_ids": _ROW, "labels": _ROW}, lambda step: [_tokens(step, LENGTH)] * 2),
    "one length": (
        {"input_ids": ["batch", LENGTH], "labels": ["batch", LENGTH]},
        lambda step: [_tokens(step, LENGTH)] * 2,
    ),
    "translation": ({"input_ids": _ROW, "attention_mask": _ROW, "labels": ["batch", "target"]}, _translation),
    "images": ({"pixel_values": _IMAGE, "labels": ["batch"]}, _images),
    "maps": ({"pixel_values": _IMAGE, "labels": ["batch", IMAGE, IMAGE]}, _maps),
    "videos": ({"pixel_values": ["batch", 2, 3, IMAGE, IMAGE], "labels": ["batch"]}, _videos),
    "spectrograms": ({"input_features": ["batch", 16, 24], "labels": ["batch", "target"]}, _spectrograms),
    "spectrum classes": ({"input_values": ["batch", 24, 16], "labels": ["batch"]}, _spectrum_classes),
    "sounds": ({"input_values": ["batch", 800], "labels": ["batch"]}, _sounds),
    "spoken": ({"input_values": ["batch", 800], "labels": ["batch", "target"]}, _spoken),
    "series": ({"past_values": ["batch", 32, 3], "future_values": ["batch", 8, 3]}, _series),
    "pairs": ({"input_ids": _ROW, "attention_mask": _ROW, "pixel_values": _IMAGE}, _pairs),
    "boxes": ({"pixel_values": [2, *_IMAGE[1:]], "class_labels": [2, 2], "boxes": [2, 2, 4]}, _boxes),
    "captions": ({"input_ids": _ROW, "attention_mask": _ROW, "pixel_values": _IMAGE, "labels": _ROW}, _captions),
}


# ---------------------------------------------------------------- architectures


@dataclass(frozen=True)
class Family:
    """An architecture: its class in transformers, what it is fed, and what its configuration has beside `SIZES`."""

    model: str
    kind: str = "language"
    attentions: tuple[str, ...] = BOTH
    sizes: dict = field(default_factory=dict)


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    "num_labels": CLASSES,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
SEQ2SEQ = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32,
}  # fmt: skip
T5 = {"d_ff": 48, "d_kv": 8, "num_decoder_layers": 2, "relative_attention_num_buckets": 8}
PATCHES = {"image_size": IMAGE, "patch_size": 8, "num_channels": 3}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "image_size": IMAGE}
SOUND = {
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "classifier_proj_size": 16, "feat_extract_norm": "group",
}  # fmt: skip
TEXT_AND_IMAGE = {
    "text_config": {k: v for k, v in SIZES.items() if k != "num_labels"} | {"projection_dim": 16},
    "vision_config": {
        **PATCHES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "projection_dim": 16,
    },
    "projection_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "output_router_logits": True}
MAMBA = {"state_size": 4, "time_step_rank": 4, "conv_kernel": 4}

FAMILIES = {
    "bert": Family("BertForMaskedLM"),
    "bert-answers": Family("BertForQuestionAnswering", "answers", NO_ATTENTION, {"num_labels": 2}),
    "roberta": Family("RobertaForMaskedLM"),
    "xlm-roberta": Family("XLMRobertaForMaskedLM"),
    "camembert": Family("CamembertForMaskedLM"),
    "distilbert": Family("DistilBertForMaskedLM", sizes={"hidden_dim": 48}),
    "albert": Family("AlbertForMaskedLM", sizes={"embedding_size": 16}),
    "electra": Family("ElectraForPreTraining", "detection", sizes={"embedding_size": 16}),
    "layoutlm": Family("LayoutLMForTokenClassification", "detection"),
    "modernbert": Family("ModernBertForMaskedLM", sizes={"local_attention": 4, "global_attn_every_n_layers": 2}),
    "mpnet": Family("MPNetForMaskedLM", attentions=NO_ATTENTION),
    "convbert": Family("ConvBertForMaskedLM", attentions=NO_ATTENTION, sizes={"embedding_size": 16}),
    "squeezebert": Family("SqueezeBertForMaskedLM", attentions=NO_ATTENTION, sizes={"embedding_size": 32}),
    "fnet": Family("FNetForMaskedLM", "unmasked", NO_ATTENTION),
    "deberta-v2": Family("DebertaV2ForMaskedLM", attentions=NO_ATTENTION, sizes={"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "funnel": Family("FunnelForMaskedLM", attentions=NO_ATTENTION, sizes={"block_sizes": [1, 1], "d_head": 8, "d_inner": 48, "num_decoder_layers": 1, "num_hidden_layers": None}),
    "longformer": Family("LongformerForMaskedLM", attentions=NO_ATTENTION, sizes={"attention_window": 4}),
    "bigbird": Family("BigBirdForMaskedLM", attentions=NO_ATTENTION, sizes={"attention_type": "original_full"}),
    "gpt2": Family("GPT2LMHeadModel"),
    "gpt-neo": Family("GPTNeoForCausalLM", attentions=NO_ATTENTION, sizes={"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gpt-neox": Family("GPTNeoXForCausalLM"),
    "gpt-j": Family("GPTJForCausalLM", attentions=NO_ATTENTION, sizes={"rotary_dim": 4}),
    "opt": Family("OPTForCausalLM", sizes={"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": Family("BloomForCausalLM", attentions=NO_ATTENTION),
    "falcon": Family("FalconForCausalLM"),
    "mpt": Family("MptForCausalLM", attentions=NO_ATTENTION, sizes={"max_seq_len": 40}),
    "ctrl": Family("CTRLLMHeadModel", attentions=NO_ATTENTION, sizes={"dff": 48}),
    "xlnet": Family("XLNetLMHeadModel", attentions=NO_ATTENTION, sizes={"d_inner": 48, "d_head": 8, "max_position_embeddings": None}),
    "llama": Family("LlamaForCausalLM", sizes=GROUPED),
    "mistral": Family("MistralForCausalLM", sizes={**GROUPED, "sliding_window": 4}),
    "qwen2": Family("Qwen2ForCausalLM", sizes=GROUPED),
    "qwen3": Family("Qwen3ForCausalLM", sizes=GROUPED),
    "gemma": Family("GemmaForCausalLM", sizes=GROUPED),
    "gemma2": Family("Gemma2ForCausalLM", attentions=EAGER, sizes={**GROUPED, "sliding_window": 4}),
    "gemma3": Family("Gemma3ForCausalLM", sizes={**GROUPED, "sliding_window": 4}),
    "phi": Family("PhiForCausalLM"),
    "phi3": Family("Phi3ForCausalLM"),
    "olmo2": Family("Olmo2ForCausalLM"),
    "stablelm": Family("StableLmForCausalLM", sizes={"num_key_value_heads": 4}),
    "cohere": Family("CohereForCausalLM", sizes=GROUPED),
    "granite": Family("GraniteForCausalLM", sizes=GROUPED),
    "smollm3": Family("SmolLM3ForCausalLM", sizes=GROUPED),
    "deepseek-v3": Family("DeepseekV3ForCausalLM", sizes={
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    }),
    "mixtral": Family("MixtralForCausalLM", sizes={**GROUPED, **EXPERTS}),
    "qwen2-moe": Family("Qwen2MoeForCausalLM", sizes={**EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_key_value_heads": 2}),
    "gpt-oss": Family("GptOssForCausalLM", attentions=NO_ATTENTION, sizes={**GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 4}),
    "minimax": Family("MiniMaxForCausalLM", attentions=NO_ATTENTION, sizes={**GROUPED, **EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 4}),
    "switch": Family("SwitchTransformersForConditionalGeneration", "translation", NO_ATTENTION, {**T5, "num_experts": 4}),
    "mamba": Family("MambaForCausalLM", "one length", NO_ATTENTION, MAMBA),
    "mamba2": Family("Mamba2ForCausalLM", "one length", NO_ATTENTION, {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    "falcon-mamba": Family("FalconMambaForCausalLM", "one length", NO_ATTENTION, MAMBA),
    "recurrent-gemma": Family("RecurrentGemmaForCausalLM", "one length", NO_ATTENTION, {
        "lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 4, "num_key_value_heads": 1, "head_dim": 8,
    }),
    "rwkv": Family("RwkvForCausalLM", "one length", NO_ATTENTION, {"attention_hidden_size": 32, "context_length": 40}),
    "bart": Family("BartForConditionalGeneration", "translation", sizes=SEQ2SEQ),
    "mbart": Family("MBartForConditionalGeneration", "translation", sizes=SEQ2SEQ),
    "marian": Family("MarianMTModel", "translation", sizes=SEQ2SEQ),
    "pegasus": Family("PegasusForConditionalGeneration", "translation", sizes=SEQ2SEQ),
    "blenderbot": Family("BlenderbotForConditionalGeneration", "translation", sizes=SEQ2SEQ),
    "m2m100": Family("M2M100ForConditionalGeneration", "translation", sizes=SEQ2SEQ),
    "t5": Family("T5ForConditionalGeneration", "translation", NO_ATTENTION, T5),
    "longt5": Family("LongT5ForConditionalGeneration", "translation", NO_ATTENTION, {
        **T5, "encoder_attention_type": "transient-global", "local_radius": 2, "global_block_size": 4,
    }),
    "vit": Family("ViTForImageClassification", "images", sizes=PATCHES),
    "deit": Family("DeiTForImageClassification", "images", sizes=PATCHES),
    "beit": Family("BeitForImageClassification", "images", sizes={**PATCHES, "use_relative_position_bias": True}),
    "dinov2": Family("Dinov2ForImageClassification", "images", sizes=PATCHES),
    "swin": Family("SwinForImageClassification", "images", sizes={
        "image_size": IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    }),
    "swinv2": Family("Swinv2ForImageClassification", "images", NO_ATTENTION, {
        "image_size": IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    }),
    "segformer": Family("SegformerForSemanticSegmentation", "maps", sizes={
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3],
        "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    }),
    "convnext": Family("ConvNextForImageClassification", "images", NO_ATTENTION, {**STAGES, "patch_size": 4}),
    "convnextv2": Family("ConvNextV2ForImageClassification", "images", NO_ATTENTION, {**STAGES, "patch_size": 4}),
    "resnet": Family("ResNetForImageClassification", "images", NO_ATTENTION, {**STAGES, "embedding_size": 8, "hidden_act": "silu"}),
    "poolformer": Family("PoolFormerForImageClassification", "images", NO_ATTENTION, {
        "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "patch_sizes": [3, 3, 3, 3], "strides": [2, 2, 2, 2], "padding": [1, 1, 1, 1],
    }),
    "mobilevit": Family("MobileViTForImageClassification", "images", NO_ATTENTION, {
        "image_size": IMAGE, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 24],
    }),
    "videomae": Family("VideoMAEForVideoClassification", "videos", sizes={**PATCHES, "num_frames": 2, "tubelet_size": 2}),
    "timesformer": Family("TimesformerForVideoClassification", "videos", NO_ATTENTION, {**PATCHES, "num_frames": 2}),
    "whisper": Family("WhisperForConditionalGeneration", "spectrograms", sizes={
        **SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 12, "max_target_positions": 20,
    }),
    "wav2vec2": Family("Wav2Vec2ForSequenceClassification", "sounds", sizes=SOUND),
    "wav2vec2-ctc": Family("Wav2Vec2ForCTC", "spoken", sizes=SOUND),
    "hubert": Family("HubertForSequenceClassification", "sounds", sizes=SOUND),
    "wavlm": Family("WavLMForSequenceClassification", "sounds", NO_ATTENTION, SOUND),
    "patchtst": Family("PatchTSTForPrediction", "series", NO_ATTENTION, {
        "num_input_channels": 3, "context_length": 32, "prediction_length": 8, "patch_length": 4, "patch_stride": 4,
        "d_model": 16, "ffn_dim": 32,
    }),
    "ast": Family("ASTForAudioClassification", "spectrum classes", sizes={"patch_size": 8, "num_mel_bins": 16, "max_length": 24, "frequency_stride": 8, "time_stride": 8}),
    "detr": Family("DetrForObjectDetection", "boxes", NO_ATTENTION, {
        **SEQ2SEQ, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 6, "use_timm_backbone": False, "use_pretrained_backbone": False,
        "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"]},
    }),
    "yolos": Family("YolosForObjectDetection", "boxes", NO_ATTENTION, {**PATCHES, "image_size": [IMAGE, IMAGE], "num_detection_tokens": 6}),
    "clip": Family("CLIPModel", "pairs", sizes=TEXT_AND_IMAGE),
    "siglip": Family("SiglipModel", "pairs", sizes=TEXT_AND_IMAGE),
    "blip": Family("BlipForConditionalGeneration", "captions", NO_ATTENTION, TEXT_AND_IMAGE),
}  # fmt: skip


def entries() -> list[str]:
    """`family` or `family-attention`."""
    return ["-".join(filter(None, (name, how))) for name, family in FAMILIES.items() for how in family.attentions]


class ReturnsLoss(nn.Module):
    """A model of two inputs that compares them, asked for its loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, pixel_values):
        result = self.model(
            input_ids=input_ids, attention_mask=attention_mask, pixel_values=pixel_values, return_loss=True
        )
        return (result.loss,)


class Detects(nn.Module):
    """A model that takes its labels as a dictionary for each picture."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values, class_labels, boxes):
        labels = [{"class_labels": things, "boxes": places} for things, places in zip(class_labels, boxes)]
        return (self.model(pixel_values=pixel_values, labels=labels).loss,)


WRAPPED = {"pairs": ReturnsLoss, "boxes": Detects}


def make(entry: str, dropout: bool) -> Job:
    """The job of one entry; with `dropout` every rate of its configuration is above 0 and unlike the others."""
    import transformers

    name, _, attention = entry.rpartition("-") if entry.endswith(BOTH) else (entry, "", "")
    family = FAMILIES[name]
    axes, batch = KINDS[family.kind]
    model = getattr(transformers, family.model)
    sizes = _sizes(family, model.config_class.attribute_map)
    config = model.config_class(**sizes, **({"attn_implementation": attention} if attention else {}))
    _set_dropout(config, dropout)
    torch.manual_seed(0)
    module = model(config).train()
    return Job(WRAPPED[family.kind](module) if family.kind in WRAPPED else module, axes, batch)


def _sizes(family: Family, aliases: dict[str, str]) -> dict:
    """`SIZES` and the family's own, which go first, under an alias too; None takes one away."""
    common = {} if "text_config" in family.sizes else SIZES
    sizes = {name: value for name, value in common.items() if aliases.get(name) not in family.sizes} | family.sizes
    return {name: value for name, value in sizes.items() if value is not None}


def _set_dropout(config, dropout: bool) -> None:
    """Rates of 0, or 0.1, 0.11, 0.12 ...; whole layers are never dropped, which a graph cannot do."""
    rate = 0.1
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _set_dropout(value, dropout)
        elif "drop" in name and isinstance(value, float):
            plain = dropout and "layerdrop" not in name and "path" not in name
            setattr(config, name, round(rate, 2) if plain else 0.0)
            rate += 0.01


# ---------------------------------------------------------------- the check


def check(entry: str, limit: int | None = None) -> Iterator[Outcome]:
    """Train without dropout beside PyTorch; then a step with dropout, all masks counted."""
    for sample, run in list({"training": _training, "dropout": _dropout}.items())[:limit]:
        try:
            yield run(entry, sample)
        except OrtTrainerError as error:
            yield failed(sample, error)


def _adam(parameters) -> reference.AdamBefore:
    return reference.AdamBefore(parameters, RATE, lambda name: 0.0, EPSILON)


def _training(entry: str, sample: str) -> Outcome:
    job = make(entry, dropout=False)
    expected, _ = job.train_in_torch(_adam, STEPS)
    losses = job.train(job.trainer("AdamOptimizer", lambda name: {"epsilon": EPSILON}), RATE, range(STEPS))
    worst, allowed = _difference(losses, expected), TOLERANCE
    if worst > TOLERANCE:  # PyTorch is the judge of what is rounding
        exact, _ = make(entry, dropout=False).train_in_torch(_adam, STEPS, torch.float64)
        worst, allowed = _difference(losses, exact), TOLERANCE + 10 * _difference(expected, exact)
    figures = f"losses differ by {worst:.1e} of {allowed:.1e}; {expected[0]:.4f} to {expected[-1]:.4f}"
    good = worst <= allowed and expected[0] != expected[-1]
    return Outcome(sample, State.PASSED if good else State.WRONG, figures)


def _difference(losses, expected) -> float:
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, expected))


def _dropout(entry: str, sample: str) -> Outcome:
    job = make(entry, dropout=True)
    with CountedDropouts() as counted, torch.no_grad():
        job.loss(job.module, 0)
    trainer = job.trainer("AdamOptimizer")
    losses = [trainer.train_step(*job.batch(0), torch.tensor([0.0])).item() for _ in range(2)]
    found = dropouts_of(trainer)
    if found != counted.rates:
        return Outcome(sample, State.WRONG, f"{dict(found)} active dropouts, PyTorch has {dict(counted.rates)}")
    if found and losses[0] == losses[1]:
        return Outcome(sample, State.WRONG, "two steps have the same masks")
    return Outcome(sample, State.PASSED, f"{found.total()} dropouts")
