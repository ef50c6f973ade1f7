"""LMs as people have them: weights, settings, tokenizers that do not fit, damaged folders, special tokens."""
import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from conftest import corpus_of, fast_tokenizer, random_lm, same, weights
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

import train_nmg
from support import models, runs
from support.models import special_tokens_of
from support.runs import UserError

SMALL = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
         "intermediate_size": 8, "max_position_embeddings": 64, "pad_token_id": 0}


def lm_of(kind, folder, **config):
    config = transformers.CONFIG_MAPPING[kind](**config)
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    return models.load_lm(str(folder))


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def as_pickle(folder, content):
    """Replaces the weights of a folder by a pytorch_model.bin."""
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


def add_tokens(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["covid-19", "sars-cov-2"])
    tokenizer.save_pretrained(folder)


def saved(folder):
    return load_file(folder / "model.safetensors")


# ---------------------------------------------------------------- weights

def test_a_missing_head_is_drawn_by_the_seed(tmp_path):
    """Not by what torch's generator has come to, which it leaves where it was. What was saved in half
    precision is trained in full."""
    random_lm("bert", dropout=0.1).bert.bfloat16().save_pretrained(tmp_path)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = models.load_lm(str(tmp_path), 0)
    assert torch.equal(state, torch.get_rng_state())
    assert {weight.dtype for weight in one.parameters()} == {torch.float32}
    torch.manual_seed(2)
    assert same(weights(one), weights(models.load_lm(str(tmp_path), 0)))
    assert not same(weights(one), weights(models.load_lm(str(tmp_path), 1)))


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_that_is_not_shared_is_missing(tied, tmp_path, capsys):
    """The file has none: it is the embeddings, where config.json says so, else a random one."""
    random_lm("bert").save_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=tied)
    model = models.load_lm(str(tmp_path))
    assert ("cls.predictions.decoder.weight: NEWLY INITIALIZED" in capsys.readouterr().out) == (not tied)
    assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight) == tied


def test_what_is_not_used_of_a_file_is_told(tmp_path, capsys):
    """Layers, and a head of another name; the pooler and heads of other tasks are no news."""
    config = transformers.BertConfig(**random_lm("bert").config.to_dict())
    transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    models.load_lm(str(tmp_path))
    assert not capsys.readouterr().out
    edit_config(tmp_path, num_hidden_layers=1)
    state = saved(tmp_path)
    as_pickle(tmp_path, {name.replace("cls.predictions", "my_head"): state[name] for name in state})
    models.load_lm(str(tmp_path))
    said = capsys.readouterr().out
    assert re.search(r"lack \d+ weights of its file, which are left out", said) and "encoder.layer.1." in said
    assert "no weights for cls.predictions.bias" in said and "(left out of its file: " in said


@pytest.mark.parametrize("kind", ["deberta", "deberta-v1"])
def test_the_head_of_microsofts_deberta_is_used(kind, tmp_path, capsys):
    """Under its own name, lm_predictions; config.json does not speak of it."""
    config = type(random_lm(kind).config)(**random_lm(kind).config.to_dict() | {"legacy": False})
    lm = transformers.AutoModelForMaskedLM.from_config(config).eval()
    lm.save_pretrained(tmp_path)
    assert any(name.startswith("lm_predictions.") for name in saved(tmp_path))
    edit_config(tmp_path, legacy=True)
    opened = models.load_lm(str(tmp_path))
    assert not capsys.readouterr().out
    assert same(weights(opened), weights(lm))
    ids = torch.arange(5, 15)[None]
    assert torch.equal(opened(input_ids=ids).logits, lm(input_ids=ids).logits)
    # What is saved is opened again with the same head.
    opened.save_pretrained(tmp_path / "again")
    assert same(weights(models.load_lm(str(tmp_path / "again"))), weights(lm))


def test_a_checksum_is_that_of_the_whole_lm(lm_folder):
    """Weights, config and tokenizer, and nothing else that lies there; that of the weights stands first."""
    found = [models.weights_of(str(lm_folder))]
    (lm_folder / "README.md").write_text("One.")
    assert models.weights_of(str(lm_folder)) == found[0]
    edit_config(lm_folder, hidden_act="relu")
    found.append(models.weights_of(str(lm_folder)))
    (lm_folder / "tokenizer.json").write_text("{}")
    found.append(models.weights_of(str(lm_folder)))
    assert len(set(found)) == 3 and len({checksum[:64] for checksum in found}) == 1
    as_pickle(lm_folder, saved(lm_folder))
    assert models.weights_of(str(lm_folder))[:64] != found[0][:64]
    assert models.weights_of("tiny") and models.weights_of("bert-base-uncased") is None


def test_big_bird_attends_in_full(tmp_path):
    """It would from the first short batch on; so it does from the beginning."""
    lm = lm_of("big_bird", tmp_path, **SMALL | {"block_size": 4, "num_random_blocks": 1})
    assert lm.bert.attention_type == "original_full"


@pytest.mark.parametrize(("setting", "value"), [
    ("return_dict", False), ("output_attentions", True), ("chunk_size_feed_forward", 3),
    # Which would be fetched from the hub, and run.
    ("attn_implementation", "kernels-community/flash-attn"),
])
def test_settings_that_change_what_is_returned(setting, value, tmp_path):
    """The LM returns what it does without them, and can be saved."""
    lm = random_lm("bert").eval()
    lm.save_pretrained(tmp_path)
    edit_config(tmp_path, **{setting: value})
    opened = models.load_lm(str(tmp_path)).eval()
    ids = torch.arange(5, 15)[None]
    assert torch.equal(opened(input_ids=ids).logits, lm(input_ids=ids).logits)
    opened.save_pretrained(tmp_path / "again")


def test_a_fine_tuned_model_fetches_no_code_and_has_one_label(tmp_path):
    auto_class = transformers.AutoModelForSequenceClassification
    transformers.BertForSequenceClassification(random_lm("bert").config).save_pretrained(tmp_path)
    edit_config(tmp_path, attn_implementation="kernels-community/flash-attn")
    models.load_finetuned(str(tmp_path), auto_class)
    edit_config(tmp_path, problem_type="multi_label_classification")
    with pytest.raises(UserError, match="does not choose one of several labels"):
        models.load_finetuned(str(tmp_path), auto_class)


# ---------------------------------------------------------------- folders

@pytest.mark.parametrize(("change", "said"), [
    (lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
     "cannot be opened: .*a pointer of Git LFS, fetch it again"),
    (lambda folder: edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.Own"}),
     "contains custom code"),
    # transformers would open the LM beside an adapter without it.
    (lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
     r"holds an adapter \(adapter_config.json\).*merge_and_unload"),
    (shutil.rmtree, "there is no such folder; allowed are 'tiny'"),
    (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
    (lambda folder: (folder / "config.json").rename(folder / "policy.json"), "this is a policy"),
    (lambda folder: (folder / "started.json").touch(), "has not finished"),
    (lambda folder: [file.unlink() for file in folder.glob("*token*")], "its tokenizer knows no words"),
    (lambda folder: edit_config(folder, quantization_config={"quant_method": "bitsandbytes"}),
     "its weights are quantized"),
    (lambda folder: edit_config(folder, is_decoder=True), "is_decoder is true in its config.json, as in a"),
    (add_tokens, r"2 tokens that the LM has no embedding for .*call resize_token_embeddings\(112\)"),
    # weights that do not fit
    (lambda folder: as_pickle(folder, {f"module.{name}": x for name, x in saved(folder).items()}),
     "37 of the encoder's 37 weights are not in its file: bert.embeddings.word_embeddings.weight; in the "
     "file stands module."),
    (lambda folder: edit_config(folder, num_hidden_layers=3), "16 of the encoder's 53 weights are not in its "
     "file: bert.encoder.layer.2.attention.self.query.weight; names and layers"),
    (lambda folder: edit_config(folder, vocab_size=130),
     r"bert.embeddings.word_embeddings.weight has the shape \(110, 32\) in the file, and \(130, 32\) by"),
    (lambda folder: lm_of("fnet", folder, **SMALL), "FNetForMaskedLM takes no attention mask"),
])
def test_a_folder_that_cannot_be_opened_is_one_sentence(change, said, lm_folder):
    with pytest.raises(UserError, match=said) as error:
        change(lm_folder)
        models.load_tokenizer(str(lm_folder))
        models.load_lm(str(lm_folder))
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- tokenizers

def test_a_vocabulary_with_gaps(tmp_path):
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 4, "a": 10, "b": 20, "c": 30}
    backend = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]",
                                                     pad_token="[PAD]", mask_token="[MASK]")
    special = special_tokens_of(tokenizer)
    assert special.vocabulary_size == 31
    assert special.ordinary_ids.tolist() == [10, 20, 30]
    assert corpus_of(tmp_path, tokenizer, "a b c d").input_ids.tolist() == [10, 20, 30, 1]


def test_special_tokens_that_are_not_used_are_told(lm_folder, capsys):
    models.load_tokenizer(str(lm_folder))
    assert not capsys.readouterr().out
    file = lm_folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    models.load_tokenizer(str(lm_folder))
    assert "its tokenizer has [CLS], but puts nothing around texts" in capsys.readouterr().out


@pytest.mark.parametrize("types", [1, 0])
def test_a_lm_with_one_token_type_gets_none(types, lm_folder):
    """Though its tokenizer has two."""
    edit_config(lm_folder, type_vocab_size=types)
    tokenizer = models.load_tokenizer(str(lm_folder))
    assert not special_tokens_of(tokenizer).pair_types and "token_type_ids" not in tokenizer("a", "a")


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_special_tokens_written_in_a_text_are_text(kind, tmp_path):
    """They may be masked like other words, and what stands around them is what the tokenizer puts there. A
    marker that somebody added stays one token, which is not masked."""
    tokenizer = fast_tokenizer(kind)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<e1>"]})
    tokenizer.add_tokens(["covid-19"])
    marker, word = tokenizer.convert_tokens_to_ids(["<e1>", "covid-19"])
    text = "a [SEP] b [MASK] c [PAD] <e1> d covid-19"
    split = corpus_of(tmp_path, tokenizer, text)
    named = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id, marker}
    assert named.isdisjoint(split.input_ids.tolist()) and named
    assert np.count_nonzero(split.input_ids == marker) == np.count_nonzero(split.input_ids == word) == 1
    assert (split.word_ids[split.input_ids == marker] == -1).all()
    assert (split.word_ids[split.input_ids != marker] >= 0).all()
    covered = set()
    for begin, end in zip(split.char_begin, split.char_end, strict=True):
        covered |= set(range(begin, end))
    assert {i for i, c in enumerate(text) if c != " "} <= covered
    # The tokenizer itself is as it was.
    assert tokenizer("[SEP]", add_special_tokens=False)["input_ids"] == [tokenizer.sep_token_id]


def test_a_card_names_what_the_hub_has_and_the_command_that_makes_the_same(tmp_path):
    """None is said where it is not the default."""
    cfg = runs.parse_flags(train_nmg.Config, ["--clip=None", "--lm=a/b", "--dataset=hf:c/d:sst2"])
    models.write_card(tmp_path, "train_nmg.py", cfg, "learned", "", library_name="transformers")
    card = ModelCard.load(tmp_path / "README.md")
    assert "# a/b, learned on c/d\n" in card.text
    assert (card.data.base_model, card.data.datasets) == ("a/b", ["c/d"])
    said = re.search("python train_nmg.py (.*)", card.text)[1]
    assert "--clip=None" in said and runs.parse_flags(train_nmg.Config, said.split()) == cfg
