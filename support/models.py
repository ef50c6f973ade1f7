"""The language model: opened by its name, asked for its hidden states, given the head of a task."""
import hashlib
import inspect
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import ModelCard, ModelCardData
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import find_adapter_config_file, logging

from support import runs, toy
from support.data import Batch, SpecialTokens
from support.devices import attention_implementation, autocast, device, to_device
from support.rng import torch_seed
from support.runs import UserError

# What an LM is besides its weights. Other files, such as a run's, do not count.
CONFIG_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt", "*.model")
# Logits of the MLM head that are computed at once: 0.5 GB in fp32, of which a score makes a few copies.
MOST_LOGITS = 2**27

# ---------------------------------------------------------------- by name

def folder_of(name: str) -> Path:
    """Where an LM lies, if it is no hub name."""
    return toy.TINY if name == "tiny" else Path(name)


def open_lm(name: str, auto_class: type, **options: object):
    """What auto_class.from_pretrained makes of an LM: the embedded `tiny`, a folder, or a hub name. UserError
    where it fails, in one of many ways."""
    place = folder_of(name)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        check_folder(name, place)
        # Code that a model folder brings along is never run.
        return auto_class.from_pretrained(str(place), trust_remote_code=False, **options)
    except UserError:
        raise
    except Exception as e:
        reason = str(e).strip().split("\n")[0][:300]
        advice = "if a file of it is cut short, or a pointer of Git LFS, fetch it again"
        if not place.exists():
            advice = "there is no such folder; allowed are 'tiny', a Hugging Face folder, or a hub name"
        raise UserError(f"--lm={name}: cannot be opened: {reason} ({advice})") from e


def check_folder(name: str, place: Path) -> None:
    """Raises UserError if an LM's folder is not what from_pretrained may open."""
    if (place / "policy.json").exists():
        raise UserError(f"--lm={name}: this is a policy, for pretrain.py --masker=sampled:{name}; an LM is "
                        "needed here")
    # transformers opens an LM without its adapter, and says nothing.
    if find_adapter_config_file(str(place)):
        raise UserError(f"--lm={name}: holds an adapter (adapter_config.json), as LoRA makes them, which is "
                        "not read here; put it into its LM with merge_and_unload() of the library peft, and "
                        "save that in a folder of its own")
    if runs.is_unfinished(place):
        raise UserError(f"--lm={name}: the run that makes it has not finished; start its command again")
    if place.exists() and not (place / "config.json").exists():
        raise UserError(f"--lm={name}: no config.json in it; allowed are 'tiny', a Hugging Face folder, or "
                        "a hub name")


def open_config(name: str):
    """The config of an LM. Raises UserError if it is not one of a masked LM that can be trained."""
    # Outputs are read by name, without attention weights, and computed for a whole text at a time.
    settings = {"return_dict": True, "output_attentions": False, "chunk_size_feed_forward": 0}
    config = open_lm(name, AutoConfig, **settings)
    if getattr(config, "quantization_config", None):
        raise UserError(f"--lm={name}: its weights are quantized, so that they cannot be trained; its "
                        "original is needed")
    for setting in ("is_decoder", "add_cross_attention", "causal"):
        if getattr(config, setting, False):
            raise UserError(f"--lm={name}: {setting} is true in its config.json, as in a decoder; a masked "
                            "LM is needed, whose tokens see all others")
    # config.json may name a kernel of the hub here, which would be fetched and run.
    config._attn_implementation = attention_implementation()
    # At its first batch of short texts BigBird switches from sparse to full attention, and says nothing.
    if config.model_type == "big_bird":
        config.attention_type = "original_full"
    return config


def load_tokenizer(name: str):
    """The fast tokenizer of an LM, which knows words and character offsets, and has no ids or token types
    that the LM does not have. Raises UserError."""
    tokenizer = open_lm(name, AutoTokenizer)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"--lm={name}: has only a slow tokenizer; a fast one (tokenizer.json) is needed")
    # What transformers makes of a folder without its files.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"--lm={name}: its tokenizer knows no words; tokenizer.json or the vocabulary is "
                        "needed")
    config = open_lm(name, AutoConfig)
    rows = getattr(config, "vocab_size", None)
    beyond = [token for token, i in tokenizer.get_vocab().items() if rows is not None and i >= rows]
    if beyond:
        raise UserError(f"--lm={name}: its tokenizer has {len(beyond)} tokens that the LM has no embedding "
                        f"for ({', '.join(sorted(beyond)[:3])}); call resize_token_embeddings("
                        f"{rows + len(beyond)}) of the LM, and save it again")
    if (getattr(config, "type_vocab_size", None) or 0) < 2:
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        tokenizer.model_input_names = names
    special = special_tokens_of(tokenizer)
    if tokenizer.cls_token and not special.prefix + special.suffix:
        print(f"WARNING: {name}: its tokenizer has {tokenizer.cls_token}, but puts nothing around texts; it "
              "may lack the post_processor in its tokenizer.json")
    return tokenizer


def special_tokens_of(tokenizer) -> SpecialTokens:
    """What a tokenizer puts around texts. Raises UserError if it is not that of a masked LM."""
    if tokenizer.mask_token_id is None or tokenizer.pad_token_id is None:
        name = tokenizer.name_or_path or "this LM"
        raise UserError(f"the tokenizer of {name} has no mask or no padding token: not a masked LM's")
    # We run its post-processor on two texts of one word each, to see which special tokens it puts around
    # them. That does not depend on its own vocabulary.
    around = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    if tokenizer.backend_tokenizer.post_processor:
        around.post_processor = tokenizer.backend_tokenizer.post_processor
    pair = around.encode("word", "word")
    ids = pair.ids
    # 0 and 1: a token of the first and of the second text; None, special, becomes nan
    text_of = np.array(pair.sequence_ids, float)
    first, second = np.flatnonzero(text_of == 0), np.flatnonzero(text_of == 1)
    # Ids may have gaps.
    vocabulary = [*tokenizer.get_vocab().values()]
    return SpecialTokens(
        prefix=ids[:first[0]],
        middle=ids[first[-1] + 1:second[0]],
        suffix=ids[second[-1] + 1:],
        pair_types="token_type_ids" in tokenizer.model_input_names and max(pair.type_ids) > 0,
        pad_id=tokenizer.pad_token_id,
        mask_id=tokenizer.mask_token_id,
        ordinary_ids=np.setdiff1d(vocabulary, tokenizer.all_special_ids),
        vocabulary_size=max(vocabulary) + 1)


def load_lm(name: str, seed: int = 0) -> torch.nn.Module:
    """A masked LM in fp32, from a folder or the hub. An MLM head that it lacks is initialized from
    `seed`, with a warning. Raises UserError if weights of its encoder are missing."""
    config = open_config(name)
    with torch.random.fork_rng(devices=[]):
        torch_seed(seed, "MLM head")
        # check_weights reports shapes that differ, in one sentence.
        options = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = open_lm(name, AutoModelForMaskedLM, config=config, **options)
        # The files of Microsoft's DeBERTa have its MLM head under this name, which transformers reads only if
        # the config says so.
        if any(weight.startswith("lm_predictions.lm_head.") for weight in info["unexpected_keys"]):
            config.legacy = False
            model, info = open_lm(name, AutoModelForMaskedLM, config=config, **options)
    check_weights(name, model, info)
    if info["missing_keys"]:
        left_out = ", ".join(sorted(info["unexpected_keys"])[:3])
        instead = f" (left out of its file: {left_out})" if left_out else ""
        print(f"WARNING: {name} brings no weights for {', '.join(sorted(info['missing_keys']))}: "
              f"NEWLY INITIALIZED, to be learned in pre-training{instead}")
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        raise UserError(f"--lm={name}: {type(model).__name__} takes no attention mask, so that padding would "
                        "change what it computes; another LM is needed")
    return model


def load_finetuned(name: str, auto_class: type) -> torch.nn.Module:
    """A model that finetune_*.py saved, or another one with all weights of the same task (an AutoModelFor...
    class). Raises UserError if it is none."""
    config = open_config(name)
    wanted = auto_class.__name__.removeprefix("AutoModel")
    made = (config.architectures or ["model without architectures in its config.json"])[0]
    if not made.endswith(wanted):
        raise UserError(f"--lm={name}: is a {made}, and --predict needs a fine-tuned model (...{wanted}), "
                        "as this script saves without --predict")
    if config.problem_type not in (None, "single_label_classification") or config.num_labels < 2:
        raise UserError(f"--lm={name}: does not choose one of several labels ({config.problem_type}, "
                        f"{config.num_labels} labels), so that --predict cannot use it")
    model, info = open_lm(name, auto_class, config=config, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        raise UserError(f"--lm={name}: lacks the weights {', '.join(sorted(info['missing_keys'])[:3])}; copy "
                        "it again, or fine-tune again")
    return model


def check_weights(name: str, model: torch.nn.Module, info: dict) -> None:
    """Raises UserError if the weights of an LM's files are not those of its encoder. Warns of layers that
    were left out.

    info: of from_pretrained: "mismatched_keys" (name, shape in the file, shape by config.json),
    "missing_keys", "unexpected_keys"; a weight that shares another one's is not missing"""
    for weight, there, here in sorted(info["mismatched_keys"]):
        raise UserError(f"--lm={name}: its weights do not fit its config.json: {weight} has the shape "
                        f"{tuple(there)} in the file, and {tuple(here)} by config.json")
    encoder = [weight for weight in model.state_dict() if weight.startswith(model.base_model_prefix + ".")]
    # A masked LM does not use a pooler.
    missing = [weight for weight in encoder if weight in info["missing_keys"] and ".pooler." not in weight]
    if missing:
        others = sorted(info["unexpected_keys"])[:1]
        instead = f"; in the file stands {others[0]}" if others else ""
        raise UserError(f"--lm={name}: {len(missing)} of the encoder's {len(encoder)} weights are not in its "
                        f"file: {missing[0]}{instead}; names and layers must be those of its config.json")
    left_out = [weight for weight in sorted(info["unexpected_keys"]) if re.search(r"\blayers?\.\d", weight)]
    if left_out:
        print(f"WARNING: {name}: the layers of its config.json lack {len(left_out)} weights of its file, "
              f"which are left out: {', '.join(left_out[:3])}")


def set_dropout(model: torch.nn.Module, p: float) -> None:
    """Sets every dropout rate of the model. Its config stays, so that fine-tuning uses the LM's own again."""
    if p >= 1:
        raise UserError(f"--dropout={p:g}: must be below 1")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        # The rate of some attention is a number of its module.
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, p)


def max_len_of(model: torch.nn.Module, wanted: int, flag: str = "max_len") -> int:
    """The tokens that are wanted, or the LM's maximum where that is less, which is printed."""
    # Of LMs without a table of positions (relative, rotary): what they were trained on.
    most = getattr(model.config, "max_position_embeddings", None) or 8192
    for name, module in model.named_modules():
        # An Embedding, or a class of the LM's own with the same attributes (I-BERT).
        if name.endswith("position_embeddings") and hasattr(module, "padding_idx"):
            # RoBERTa's positions begin behind its padding index.
            padding = -1 if module.padding_idx is None else module.padding_idx
            most = min(most, len(module.weight) - padding - 1)
    if wanted > most:
        print(f"--{flag}={most} instead of {wanted}: this LM takes no longer text")
    return min(wanted, most)


def weights_of(lm: str) -> str | None:
    """A checksum of all that an LM in a folder is, which others may replace: sha256 of its weights, and a
    digest of its config and its tokenizer, as in "1056811a...-7e22566b"; None of hub names."""
    folder = folder_of(lm)
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    if not files:
        return None
    weights = hashlib.sha256("".join(map(runs.checksum, files)).encode()).hexdigest()
    others = {}
    for pattern in CONFIG_FILES:
        for file in folder.glob(pattern):
            others[file.name] = runs.checksum(file)
    return f"{weights}-{runs.digest(sorted(others.items()))}"


def save_lm(folder: Path, model: torch.nn.Module, tokenizer) -> None:
    """Writes a Hugging Face folder: an LM, or a model of a task, with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors hides its files from all but their owner.
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)


def write_card(folder: Path, script: str, cfg: object, done: str, text: str, **metadata: object) -> None:
    """Writes README.md of a folder that `script` made, as the Hugging Face hub shows it.

    cfg: the flags of the script; done: what was done to the LM, as in "fine-tuned"; text: what to know of it;
    metadata: as in ModelCardData, besides the LM and the data set, which are named where the hub has them"""
    base = runs.base_of(cfg.lm)
    if base != "tiny" and not base.startswith(".../"):
        metadata["base_model"] = base
    dataset = Path(cfg.dataset).name
    if cfg.dataset.startswith("hf:"):
        dataset = cfg.dataset.split(":")[1]
        metadata["datasets"] = [dataset]
    # None is left out where it is the default.
    flags = {name: value for name, value in asdict(cfg).items()
             if value is not None or getattr(type(cfg), name) is not None}
    versions = [f"{name} {version}" for name, version in runs.versions().items()]
    card = ModelCard(f"""---
{ModelCardData(**metadata).to_yaml()}
---
# {base.removeprefix(".../")}, {done} on {dataset}

{text}

    python {script} {runs.as_flags(runs.portable(flags))}

Versions: {", ".join(versions)}.
""")
    with runs.atomic_write(folder / "README.md") as partial:
        card.save(partial)


# ---------------------------------------------------------------- as it is used

class LMReader:
    """What a masker gets as `lm`: a view of the model with its current weights, without dropout or gradients.
    Moves it to the device."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def __call__(self, batch: Batch) -> torch.Tensor:
        """(B, L, H) hidden states"""
        return self.outputs(batch).last_hidden_state.float()

    def outputs(self, batch: Batch, **options: object):
        """What transformers returns for the encoder, such as hidden_states with output_hidden_states=True.
        Attentions are there only after model.set_attn_implementation("eager"), which training keeps then."""
        return self.run(self.model.base_model, batch.tensors(), **options)

    def per_token(self, batch: Batch, fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> np.ndarray:
        """(B, L) of fn(logits, input_ids), computed for a few rows at a time: logits (b, L, V) of the tokens
        that the LM would put in every place, input_ids (b, L) -> (b, L)."""
        values = []
        inputs = batch.tensors()
        B, L = batch.input_ids.shape
        rows = max(1, MOST_LOGITS // (L * self.model.config.vocab_size))
        for start in range(0, B, rows):
            tensors = {name: tensor[start:start + rows] for name, tensor in inputs.items()}
            logits = self.run(self.model, tensors).logits.float()
            input_ids = tensors["input_ids"].to(logits.device)
            values.append(fn(logits, input_ids).cpu().numpy())
        return np.concatenate(values)

    @torch.no_grad()
    def run(self, module: torch.nn.Module, tensors: dict[str, torch.Tensor], **options: object):
        training = self.model.training
        self.model.to(device()).eval()
        with autocast(self.model):
            output = module(**to_device(tensors), **options)
        self.model.train(training)
        return output


def with_head(lm: torch.nn.Module, auto_class: type, seed: int, **config: object) -> torch.nn.Module:
    """A task model (an AutoModelFor... class) around a copy of the LM's encoder.

    Its head is fresh, and so is BERT's pooler, which a masked LM does not have. config: what the task changes
    in the LM's config, such as num_labels."""
    changed = type(lm.config).from_dict(lm.config.to_dict() | config)
    # The dict is without this setting.
    changed._attn_implementation = lm.config._attn_implementation
    # On the device "meta" a model has shapes and no weights, which costs next to nothing.
    with torch.device("meta"):
        model_class = type(auto_class.from_config(changed, trust_remote_code=False))
    # from_pretrained initializes the weights that it is not given, on the CPU. Of the encoder we give it only
    # the shapes (each a single 0, expanded). The weights are copied where they are, so none leaves a GPU.
    encoder, shapes = {}, {}
    for name, weight in lm.base_model.state_dict().items():
        encoder[name] = weight.clone()
        zero = torch.zeros((), dtype=weight.dtype)
        shapes[f"{model_class.base_model_prefix}.{name}"] = zero.expand_as(weight)
    with torch.random.fork_rng(devices=[]):
        torch_seed(seed, "head")
        model = model_class.from_pretrained(None, config=changed, state_dict=shapes, dtype=torch.float32)
    model.base_model.load_state_dict(encoder, strict=False, assign=True)
    return model.to(lm.device)
