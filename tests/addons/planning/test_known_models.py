"""``dschat-lora models``: the table of types, and what a configuration says of a model."""

import json

import pytest
from families_table import UNPACKED, from_matrix
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dschat_lora.addons.planning.families import (
    COLUMNS,
    NO_EXPERTS,
    Families,
    page,
    read_families,
    word,
)
from dschat_lora.addons.planning.known_models import model_facts
from dschat_lora.addons.planning.verbs import models

SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 1}
TABLE = Families(
    "5.0",
    {
        "llama": {"trains": True, "experts": NO_EXPERTS, "packed": "it mixes", "gguf": True},
        "mixtral": {"trains": True, "experts": True, "packed": "it mixes", "merge": "_two_ values"},
    },
    {"bert": "an encoder"},
)


def saved(directory, kind, **others):
    AutoConfig.for_model(kind, **SIZES | others).save_pretrained(directory)
    return str(directory)


def test_the_table_that_comes_along_is_of_types_and_columns_that_exist():
    families = read_families()
    assert len(families.types) >= 40
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert {*families.types, *families.left_out} <= known
    assert not families.types.keys() & families.left_out.keys()
    for kind, cells in families.types.items():
        assert cells.keys() <= COLUMNS.keys(), kind
        assert all(cell is True or (isinstance(cell, str) and cell) for cell in cells.values()), (
            kind
        )
        assert "/tmp" not in str(cells)


def test_cells_of_the_matrix_become_columns_of_which_each_needs_all_its_checks():
    rows = [
        {"type": "a", "check": "sft", "ok": True, "found": "loss 1e-7"},
        {"type": "a", "check": "greedy", "ok": True, "found": "equal"},
        {"type": "a", "check": "logprobs", "ok": False, "found": "they differ by 0.3"},
        {"type": "a", "check": "packed", "ok": True, "found": "unpacked, 1e-7"},
        {"type": "a", "check": "ppo", "ok": False, "found": "it stopped"},
        {"type": "b", "check": "packed", "ok": True, "found": "1e-7"},
        {"type": "b", "check": "to_peft", "ok": False, "found": "logits differ"},
        {"type": "b", "check": "from_peft", "ok": True, "found": "1e-7"},
    ]
    assert from_matrix(rows) == {
        "a": {
            "trains": True,
            "packed": UNPACKED,
            "rollouts": "they differ by 0.3",
            "ppo": "it stopped",
        },
        "b": {"packed": True, "peft": "logits differ"},
    }


def test_words_of_cells_and_reasons_by_column():
    assert [word(cell) for cell in (True, "why", NO_EXPERTS, None)] == ["yes", "no", "-", "?"]
    assert TABLE.why_not() == {
        "packed": {"it mixes": ["llama", "mixtral"]},
        "merge": {"_two_ values": ["mixtral"]},
    }
    rows = {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in TABLE.rows()}
    assert rows["mixtral"]["merge"] == "no"
    assert rows["llama"]["ppo"] == "?"


def test_the_page_has_a_row_for_each_type_and_every_reason(monkeypatch):
    monkeypatch.setattr("dschat_lora.addons.planning.families.read_families", lambda: TABLE)
    text = page()
    assert "| llama | yes | - | no | ? |" in text
    assert "* it mixes: llama, mixtral" in text
    assert r"* \_two\_ values: mixtral" in text
    assert "* an encoder: bert" in text
    assert "transformers 5.0" in text


@pytest.mark.smoke
def test_the_list_is_printed_with_reasons_and_as_json(capsys):
    models([])
    text = capsys.readouterr().out
    families = read_families()
    for kind in families.types:
        assert f"\n{kind} " in text
    assert "TP: one model on several processes; not for" in text
    models(["--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(vars(families), ensure_ascii=False)
    )


def test_of_a_model_its_configuration_says_what_would_learn_and_whether_two_processes_divide_it(
    tmp_path, capsys
):
    name = saved(tmp_path, "llama", tie_word_embeddings=False)
    facts = model_facts(name, TABLE)
    block = 2 * (16 * (32 + 32)) + 2 * (16 * (32 + 16)) + 3 * 16 * (32 + 64)
    base = 2 * 100 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    assert facts["parameters"] == base + 2 * block
    assert facts["refused"] == {}
    assert facts["learns"]["words"].startswith("q_proj, k_proj, v_proj, o_proj, gate_proj")
    assert facts["cells"] == TABLE.types["llama"] | {"tensor_parallel": True}
    models([name])
    text = capsys.readouterr().out
    for line in ("  sft          starts", "  rlhf         starts", "  trains       yes"):
        assert line in text


def test_sizes_of_the_model_itself_decide_whether_two_processes_divide_it(tmp_path):
    name = saved(tmp_path, "llama", num_key_value_heads=1)
    cell = model_facts(name, TABLE)["cells"]["tensor_parallel"]
    assert "does not divide the model's 1 key and value heads" in cell


def test_experts_of_a_model_are_named_among_what_learns(tmp_path):
    name = saved(tmp_path, "mixtral", num_local_experts=4)
    facts = model_facts(name, TABLE)
    assert "experts" in facts["learns"]["learns"]
    assert "router" in facts["learns"]["frozen"]
    assert facts["cells"]["experts"] is True


def test_a_type_that_was_not_tried_is_left_to_the_probe(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dschat_lora.addons.planning.known_models.read_families", lambda: TABLE)
    models([saved(tmp_path, "qwen2")])
    text = capsys.readouterr().out
    assert "  sft          starts" in text
    assert "was not tested with transformers 5.0: the check at the start of a run decides" in text


def test_a_model_that_a_run_would_refuse_ends_with_code_1_and_the_reason(tmp_path, capsys):
    name = saved(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "unheard_of"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        models([name, "--json"])
    assert ended.value.code == 1
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert refused.keys() == {"sft", "rlhf"}
    assert "unheard_of" in refused["sft"]


def test_what_is_no_model_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="--model_name_or_path"):
        models([str(tmp_path)])
