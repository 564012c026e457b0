"""What the cached log-probabilities of DPO's reference are of."""

from types import SimpleNamespace

from dschat_lora.config.groups import ParallelConfig
from dschat_lora.config.stages import DpoConfig, DpoStageConfig
from dschat_lora.supervised import dpo_reference
from dschat_lora.supervised.stages import loss_of_type
from helpers.tiny import tiny_model


def test_a_changed_configuration_of_the_same_weights_is_another_reference(monkeypatch, tmp_path):
    asked, model = [], tiny_model("llama")
    setup = SimpleNamespace(
        adapted=SimpleNamespace(model=model),
        config=SimpleNamespace(
            batch=SimpleNamespace(per_device_eval_batch_size=1),
            data=SimpleNamespace(data_output_path=str(tmp_path)),
            optim=SimpleNamespace(num_train_epochs=0),
            parallel=ParallelConfig(),
        ),
        data=SimpleNamespace(train=None, eval=None),
        identity={"model": "a", "start": "b", "adapter": "c", "dtype": "fp32"},
        run=SimpleNamespace(log=SimpleNamespace(say=None)),
    )

    def look(*_, identity, **__):
        asked.append(identity)

    monkeypatch.setattr(dpo_reference, "reference_logprobs", look)
    monkeypatch.setattr(dpo_reference, "rows_of", lambda *_: None)
    for epsilon in (1e-6, 1e-6, 1e-2):
        model.config.rms_norm_eps = epsilon
        layout = SimpleNamespace(collate=SimpleNamespace(positions=lambda _: None))
        loss = loss_of_type(DpoStageConfig())
        dpo_reference.make_reference(setup, None, layout, DpoConfig(), loss)
    assert asked[0] == asked[1] != asked[2]
