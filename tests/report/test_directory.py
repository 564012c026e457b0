"""A run gets a directory of its own; what it replaces is the earlier run and nothing else."""

from dschat_lora.report.directory import abandon_directory, claim_directory, leftovers


def test_default_directory_is_the_first_free_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [str(claim_directory(None, name="sft")) for _ in range(3)]
    assert names == ["output/sft", "output/sft-2", "output/sft-3"]


def test_only_what_an_earlier_run_wrote_is_removed(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "weights").write_text("w")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    assert {path.name for path in leftovers(tmp_path)} == {"adapter", "metrics.jsonl", "run.json"}
    claim_directory(str(tmp_path), name="sft")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "metrics.jsonl"}


def test_linked_adapter_is_unlinked_and_what_it_points_to_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter").symlink_to(tmp_path / "elsewhere")
    claim_directory(str(tmp_path / "out"), name="sft")
    assert (tmp_path / "elsewhere").is_dir()
    assert not (tmp_path / "out" / "adapter").is_symlink()


def test_run_that_failed_before_its_first_result_leaves_the_directory_free(tmp_path):
    path = claim_directory(str(tmp_path / "out"), name="sft")
    (path / "run.json").write_text("{}")
    (path / "metrics.jsonl").write_text("")
    assert leftovers(path) == []
    abandon_directory(path)
    assert not path.exists()


def test_directory_with_a_result_or_other_files_is_not_taken_back(tmp_path):
    path = claim_directory(str(tmp_path / "out"), name="sft")
    (path / "notes.txt").write_text("mine")
    abandon_directory(path)
    assert (path / "notes.txt").exists()
    (path / "metrics.jsonl").write_text("{}\n")
    abandon_directory(path)
    assert (path / "metrics.jsonl").exists()
