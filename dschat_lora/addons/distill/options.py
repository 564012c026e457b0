"""Options of a teacher with what step 3 asks of them: checks, a scorer and a reference."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dschat_lora.addons.distill.config import TeacherConfig
from dschat_lora.config.addons import installed
from dschat_lora.config.groups import require
from dschat_lora.rl.options.names import is_address

if TYPE_CHECKING:
    from dschat_lora.addons.distill.teacher import Teacher, TeacherScorer
    from dschat_lora.rl.options.config import RlhfConfig


@dataclass(frozen=True)
class TeacherOptions(TeacherConfig):
    """The options by which a run has its teacher."""

    def check_reference(self, config: "RlhfConfig") -> None:
        """Refuse distillation without a teacher, and a teacher without distillation.

        Raises:
            ValueError: naming the option.
        """
        if config.reference is not self:
            if given := sorted(config.given & set(type(self).__dataclass_fields__)):
                raise ValueError(
                    f"--{given[0]} is for --algorithm distill, not {config.ppo.algorithm}: use "
                    "distill, or remove the option"
                )
            return
        if self.model_name is None and self.teacher_system_prompt is None:
            raise ValueError(
                "--teacher_model_name_or_path must name a teacher, or --teacher_system_prompt a "
                "system message that makes the initial actor the teacher"
            )
        share = f"--on_policy_share {self.on_policy_share:g}"
        if self.on_policy_share < 1 and (config.is_scored or config.players):
            raise ValueError(
                f"{share} also trains on answers from the data, which reward functions, reward "
                "models and environments do not score: remove one of them"
            )
        if self.on_policy_share < 1 and config.ppo.use_rollout_logprobs:
            raise ValueError(
                f"--use_rollout_logprobs needs sampled responses, but {share} takes some from the "
                "data: remove one of them"
            )
        if self.model_name is None and self.teacher_bits is not None:
            raise ValueError(
                f"--teacher_bits {self.teacher_bits} needs --teacher_model_name_or_path: the "
                "initial actor has the actor's bits"
            )
        if self.server is not None:
            if "engines" not in installed():
                raise ValueError(
                    "--teacher_model_name_or_path of a server needs the add-on engines, which is "
                    "not installed"
                )
            name, allowed = "teacher_model_name_or_path", "the address of a server, such as "
            allowed += "http://127.0.0.1:8000/v1, or a model"
            require(is_address(self.server[0]), name, self.model_name, allowed)
            if config.batch.temperature != 1:
                raise ValueError(
                    f"--temperature {config.batch.temperature:g} also applies to the teacher's "
                    f"log-probabilities, which the server {self.server[0]} returns at temperature "
                    "1: remove it"
                )

    def scorer(self) -> "TeacherScorer":
        """Minus the divergence."""
        from dschat_lora.addons.distill.teacher import TeacherScorer

        return TeacherScorer()

    def load(self, *of_run: Any) -> "Teacher":
        """The teacher by config, tokenizer, sources and run; call on every rank."""
        from dschat_lora.addons.distill.teacher import load_teacher

        return load_teacher(self, *of_run)
