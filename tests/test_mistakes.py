"""What a user may get wrong at the command line, of all scripts: one sentence each, and exit code 2."""
import pytest
from conftest import TEXTS, call, names, write_rows

from support import runs

WRONG = [
    ("pretrain.py --masker=nmg:nowhere", "nowhere: no policy of train_nmg.py in this folder"),
    ("tools/study.py --plan=wrong.toml --out=a,b", "--out=a,b: must be without a comma"),
    ("pretrain.py --masker=mine.py:rars", "mine.py has no function 'rars'"),
    ("pretrain.py --dataset=toycl", "did you mean 'toycls'?"),
    ("pretrain.py --dropout=10", "--dropout=10: must be below 1"),
    ("pretrain.py --dataset=full/c.txt --eval_every=5", "full/c.txt has no dev split to look at"),
    ("pretrain.py --dataset=full/c.txt --dev_share=0.2", "full/c.txt has no train split to cut from"),
    ("pretrain.py --dataset=full", "full: no file named train, dev, test or corpus"),
    ("pretrain.py --corpus=full/c.txt", "toycls has a corpus already"),
    ("pretrain.py --read=all", "--read=all: allowed are train, corpus, both"),
    ("finetune_cls.py --label=kind", "toycls: is not read from files"),
    ("data_prep.py --dataset=emrqa", "data-use agreement"),
    ("train_nmg.py --uniform_episodes=5", "--uniform_episodes: is not read with --paper=False"),
    ("train_nmg.py --paper --exploration=3", "--exploration: is not read with --paper=True"),
    ("train_nmg.py --dataset=full/c.txt", "has no labelled examples to learn a policy from"),
    ("train_nmg.py --episodes=0", "nothing is played, so --plays=FOLDER must name plays"),
    ("finetune_cls.py --dataset=toyqa", "holds 'qa' data, not 'cls'; it is for finetune_qa.py"),
    ("finetune_cls.py --split=tset", "--split=tset: must be dev or test"),
    ("finetune_cls.py --dataset=two.jsonl --split=test", "has no test split"),
    ("finetune_cls.py --warmup=10", "--warmup=10: a share of the steps, from 0 to 1"),
    ("finetune_cls.py --dataset=one.jsonl", "all texts of train have the label 'a'; two labels are"),
    ("finetune_cls.py --labelled=1", "all 1 labelled texts of train have the label"),
    ("data_prep.py --dataset=two.jsonl --dev_share=1", "--dev_share=1: leaves nothing of train; it must be"),
    ("train_nmg.py --out=a,b", "--out=a,b: must be without a comma"),
    ("finetune_cls.py --results=full/c.txt/results.jsonl", "full/c.txt: cannot be read or written ("),
    ("finetune_cls.py --results=/sys/x", "/sys/x.lock: cannot be read or written ("),
    ("finetune_cls.py --out=full/c.txt", "full/c.txt: cannot be read or written ("),
    ("report.py --results=no.jsonl", "--results=no.jsonl: no such file; the finetune scripts write it"),
    ("tools/toy_compare.py --out=results.jsonl", "is the picture, and must end with .png"),
    ("tools/toy_compare.py --out=two.png", "two.jsonl: holds lines of another kind, which would be lost"),
    ("tools/make_tiny.py --out=full", "--out=full: is there already; choose another folder"),
    ("tools/linear.py --dataset=two.jsonl --save_model=True", "is not kept; leave out --save_model"),
    ("tools/study.py --plan=empty.toml", "--plan=empty.toml: is empty"),
    ("tools/study.py --plan=a,b --dataset=toyqa", "--dataset=toyqa: is for one plan, and --plan has 2"),
    ("tools/figures.py --comparisons=wrong.toml", "wrong.toml: the field 'row' is missing"),
    ("tools/foretell.py --plays=a,a", "--plays=A,B: the plays of at least two runs are needed"),
    ("tools/foretell.py --plays=a,b --out=two.jsonl", "two.jsonl: holds lines of another kind"),
    ("tools/foretell.py --plays=a,b", "--plays=a: holds no plays"),
]
# What shows when the text is cut or masked, or in training, before anything is saved.
LATE = [
    ("pretrain.py --max_len=2", "a length of 2 leaves no room for text"),
    ("finetune_qa.py --max_len=3", "a window of 3 tokens leaves no room for a question"),
    ("train_nmg.py --dataset=one.jsonl --label=text --doc=label", "too few documents (1, see --doc)"),
    ("pretrain.py --dataset=full/c.txt --masker=label", "needs labels or answers in train"),
    # Its logarithm would be infinite.
    ("pretrain.py --masker=difference:zero.txt", "zero.txt:2: must be a word, a tab, and how often"),
    # After one step all weights are finite, and no output is.
    ("pretrain.py --dataset=full/c.txt --max_steps=1 --lr=1e30", "the LM: its loss is nan; a smaller"),
    ("finetune_cls.py --dataset=two.jsonl --epochs=1 --batch_size=1000 --lr=1e30",
     "the predictions became infinite or NaN; a smaller"),
]


@pytest.mark.parametrize(("command", "said"), WRONG + LATE, ids=[command for command, _ in WRONG + LATE])
def test_wrong_flags(command, said, tmp_path):
    """Nothing is written but an empty file of results, and what says that a run was begun where the mistake
    shows late."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/c.txt").write_text("bird\n" * 20)
    write_rows(tmp_path / "one.jsonl", [{"text": text, "label": "a"} for text in TEXTS * 5])
    write_rows(tmp_path / "two.jsonl", [{"text": text, "label": text[:1]} for text in TEXTS * 5])
    (tmp_path / "empty.toml").touch()
    (tmp_path / "mine.py").touch()
    (tmp_path / "zero.txt").write_text("cat\t3\nthe\t0\n")
    (tmp_path / "wrong.toml").write_text("[[table]]\nname = 'x'\n")
    before = names(tmp_path)
    script, *flags = command.split()
    result = call(script, *flags, cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    written = {*names(tmp_path)} - {*before, "results.jsonl", "results.jsonl.lock"}
    assert not written or (written == {"runs"} and (command, said) in LATE)
    # What begins with a point is the lock of the folder.
    assert {file.name for file in tmp_path.glob("runs/*/[!.]*")} <= {"started.json"}
    assert names(tmp_path / "full") == ["c.txt"] and runs.read_rows(tmp_path / "results.jsonl") == []
