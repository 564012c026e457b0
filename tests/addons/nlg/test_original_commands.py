"""The command lines that microsoft/LoRA publishes for GPT-2 start as they stand."""

import json

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Tokenizer

from dschat_lora.addons.nlg.verbs import run_nlg

TRAIN = """--train_data ./data/e2e/train.jsonl --valid_data ./data/e2e/valid.jsonl
    --train_batch_size 8 --grad_acc 1 --valid_batch_size 4 --seq_len 512 --model_card gpt2.md
    --init_checkpoint ./pretrained_checkpoints/gpt2-medium-pytorch_model.bin --platform local
    --clip 0.0 --lr 0.0002 --weight_decay 0.01 --correct_bias --adam_beta2 0.999
    --scheduler linear --warmup_step 500 --max_epoch 5 --save_interval 1000 --lora_dim 4
    --lora_alpha 32 --lora_dropout 0.1 --label_smooth 0.1 --work_dir ./trained_models/GPT2_M/e2e
    --random_seed 110"""
BEAM = """--data ./data/e2e/test.jsonl --batch_size 1 --seq_len 512 --eval_len 64
    --model_card gpt2.md --init_checkpoint ./trained_models/GPT2_M/e2e/model.26289.pt
    --platform local --lora_dim 4 --lora_alpha 32 --beam 10 --length_penalty 0.8
    --no_repeat_ngram_size 4 --repetition_penalty 1.0 --eos_token_id 628
    --work_dir ./trained_models/GPT2_M/e2e --output_file predict.26289.b10p08r4.jsonl"""
DECODE = """--vocab ./vocab --sample_file ./trained_models/GPT2_M/e2e/predict.26289.b10p08r4.jsonl
    --input_file ./data/e2e/test_formatted.jsonl --output_ref_file e2e_ref.txt
    --output_pred_file e2e_pred.txt"""
DECODE_TRIPLES = """--vocab ./vocab
    --sample_file ./trained_models/GPT2_M/{0}/predict.20000.b10p08.jsonl
    --input_file ./data/{1}/test_formatted.jsonl --ref_type {0} --ref_num 6
    --output_ref_file eval/GenerationEval/data/references_{0}
    --output_pred_file eval/GenerationEval/data/hypothesis_{0} --tokenize --lower"""
TRIPLE_DATA = {"webnlg": "webnlg_challenge_2017", "dart": "dart"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, in which ``here(name, *lines)`` makes a file."""
    monkeypatch.chdir(tmp_path)

    def make(name, *lines):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    return make


@pytest.mark.smoke
def test_training_of_gpt2_starts(here, monkeypatch):
    taken = []
    monkeypatch.setattr("dschat_lora.addons.nlg.train.run_training", taken.append)
    for part in ("train", "valid"):
        here(f"data/e2e/{part}.jsonl", {"context": [5, 50256], "completion": [6, 7, 50256]})
    here("pretrained_checkpoints/gpt2-medium-pytorch_model.bin")
    run_nlg([*TRAIN.split(), "--dry_run"])
    (config,) = taken
    assert config.model.model_name_or_path == "openai-community/gpt2-medium"
    assert config.lora.target_modules == ("c_attn",)
    assert config.lora.enable_lora == ("q", "v")
    assert (config.data.max_seq_len, config.run.output_dir) == (512, "./trained_models/GPT2_M/e2e")
    assert (config.optim.learning_rate, config.optim.adam_beta2) == (2e-4, 0.999)
    run_nlg([*TRAIN.split(), *"--obj jlm --fp16 --no_decay_bias --dry_run".split()])
    assert taken[1].data.train_on_prompt
    assert taken[1].model.dtype == "fp16"


@pytest.mark.smoke
def test_beam_search_of_gpt2_starts(here, capsys):
    here("data/e2e/test.jsonl", {"context": [5, 50256], "completion": [6, 7, 50256]})
    with pytest.raises(SystemExit):
        run_nlg(["beam", *BEAM.split(), "--dry_run"])
    assert "e2e/model.26289.pt does not exist\n" in capsys.readouterr().err
    here("trained_models/GPT2_M/e2e/run.json", {})
    with pytest.raises(SystemExit):
        run_nlg(["decode", *BEAM.split(), "--dry_run"])
    said = capsys.readouterr().err
    assert "is a run: give --init_checkpoint trained_models/GPT2_M/e2e" in said
    here("trained_models/GPT2_M/e2e/model.26289.pt")
    for verb in ("beam", "decode"):
        run_nlg([verb, *BEAM.split(), "--dry_run"])
        assert "are in order" in capsys.readouterr().out


FORMATTED = [
    {"context": "name : B", "completion": " B is one . <|endoftext|>", "cate": True},
    {"context": "name : A", "completion": "It is A-1 .", "cate": False},
    {"context": "name : B", "completion": "B it is .\n\nx", "cate": True},
]
SAMPLES = [
    {"id": 2, "predict": [9], "prediction": "B ."},
    {"id": 1, "predict": [8, 9], "prediction": "A-1 it is.\n\nIt"},
]


def test_predictions_become_files_of_the_e2e_challenge_and_are_judged(here, tmp_path, capsys):
    here("data/e2e/test_formatted.jsonl", *FORMATTED)
    here("trained_models/GPT2_M/e2e/predict.26289.b10p08r4.jsonl", *SAMPLES)
    run_nlg(["decode", *DECODE.split(), "--dry_run"])
    assert not (tmp_path / "e2e_ref.txt").exists()
    run_nlg(["decode", *DECODE.split()])
    assert (tmp_path / "e2e_ref.txt").read_text() == "B is one .\nB it is .\n\nIt is A-1 .\n\n"
    assert (tmp_path / "e2e_pred.txt").read_text() == "B .\nA-1 it is.\n"
    run_nlg(["evaluate", *"e2e_ref.txt e2e_pred.txt -p --dry_run".split()])
    assert "evaluate: 2 texts with references are in order" in capsys.readouterr().out


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRIPLE_DATA)
def test_predictions_become_files_of_generation_eval_and_are_judged(here, name, tmp_path, capsys):
    here(f"data/{TRIPLE_DATA[name]}/test_formatted.jsonl", *FORMATTED)
    here(f"trained_models/GPT2_M/{name}/predict.20000.b10p08.jsonl", *SAMPLES)
    run_nlg(["decode", *DECODE_TRIPLES.format(name, TRIPLE_DATA[name]).split()])
    home = tmp_path / "eval" / "GenerationEval" / "data"
    files = [(home / f"references_{name}" / f"reference{i}").read_text() for i in range(6)]
    assert files[0] == "b is one .\nit is a - 1 .\n"
    assert files[1] == "b it is .\nit is a - 1 .\n"
    assert files[2:] == [files[0]] * 4
    assert (home / f"hypothesis_{name}").read_text() == "b .\na - 1 it is .\n"
    scorer = f"-R {home}/references_{name}/reference -H {home}/hypothesis_{name} -nr 6"
    run_nlg(["evaluate", *scorer.split(), "-m", "bleu,meteor,ter"])
    out = capsys.readouterr().out
    assert "2 meanings, 12 references" in out
    assert [title for title in ("BLEU", "METEOR", "TER", "NIST") if title in out] == [
        *("BLEU", "METEOR", "TER")
    ]


def test_seen_categories_are_as_the_original_has_them(here, tmp_path):
    here("f.jsonl", *FORMATTED)
    here("p.jsonl", *SAMPLES[:1])
    common = "--sample_file p.jsonl --input_file f.jsonl --output_ref_file r --output_pred_file p"
    run_nlg(["format", *common.split(), "--filter", "seen"])
    assert (tmp_path / "p").read_text() == "B .\n"


def test_lora_dim_0_on_a_recipe_trains_every_weight(here, monkeypatch, capsys):
    taken = []
    monkeypatch.setattr("dschat_lora.addons.nlg.train.run_training", taken.append)
    for part in ("train", "valid"):
        here(f"e2e/{part}.jsonl", {"context": [5], "completion": [6]})
    rows = "--train_data e2e/train.jsonl --valid_data e2e/valid.jsonl"
    run_nlg(["--config", "gpt2-medium_e2e", *rows.split(), "--lora_dim", "0", "--dry_run"])
    assert (taken[0].lora.lora_dim, taken[0].lora.enable_lora) == (0, ())
    assert "--lora_dim 0 trains every weight: no enable_lora, lora_alpha" in capsys.readouterr().out


def test_several_seeds_are_not_gone_on_with(here, capsys):
    with pytest.raises(SystemExit):
        run_nlg("--seeds 2 --resume_from_checkpoint auto".split())
    assert "--seeds starts new runs; resume one of its runs" in capsys.readouterr().err


def gpt2_vocabulary(directory):
    """A directory with GPT-2's files, of single bytes alone."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(["a"], vocab_size=257, special_tokens=["<|endoftext|>"])
    (directory / "vocab").mkdir()
    made.save_model(str(directory / "vocab"))
    return directory / "vocab"


def test_token_ids_become_text_by_the_vocabulary_of_gpt2(here, tmp_path):
    """As transformers' own tokenizer of these files decodes them."""
    text = "A caf\u00e9 \u2014 it is\there ."
    tokenizer = GPT2Tokenizer.from_pretrained(gpt2_vocabulary(tmp_path))
    here("f.jsonl", {"context": "m", "completion": "x"})
    here("p.jsonl", {"id": 0, "predict": [*tokenizer.encode(text), tokenizer.eos_token_id, 5]})
    line = "--sample_file p.jsonl --input_file f.jsonl --output_ref_file r --output_pred_file t"
    run_nlg(["decode", *line.split(), "--vocab", "vocab"])
    assert (tmp_path / "t").read_text(encoding="utf-8") == text + "\n"
