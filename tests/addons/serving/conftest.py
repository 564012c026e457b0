"""The server that tests of clients, of refusals and of attacks share."""

from dataclasses import replace

import pytest

from helpers.served import endless, running_server, write_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Directories of the runs that are served, by name."""
    directory = tmp_path_factory.mktemp("runs")
    write_run(directory / "reward", seed=5, reward=True)
    return {name: write_run(directory / name, seed=seed) for seed, name in enumerate(["a", "b"])}


@pytest.fixture(scope="session")
def service(runs):
    """With the models base, a, b and one whose answers do not end."""
    server = pytest.importorskip("dschat_lora.addons.serving.server", reason="no uvicorn")
    from dschat_lora.addons.serving.config import ServeConfig
    from dschat_lora.addons.serving.decoder import AnswerDecoder

    first = runs["a"]
    options = {"reward": str(first.parent / "reward"), "max_new_tokens": 24, "temperature": 0.0}
    config = ServeConfig(models=tuple(map(str, runs.values())), **options)
    made = server.make_service(config, first / "votes.jsonl")
    models = {**made.models, "endless": endless(made.models["base"])}
    batches = {model.batch for model in models.values()}
    decoder = AnswerDecoder(batches, max_batch_size=32, max_queue=99)
    return replace(made, models=models, decoder=decoder)


@pytest.fixture(scope="session")
def address(service):
    with running_server(service) as url:
        yield url
