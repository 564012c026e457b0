"""Options of a teacher with what step 3 asks of them: a scorer and a reference."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dschat_lora.addons.distill.config import TeacherConfig

if TYPE_CHECKING:
    from dschat_lora.addons.distill.teacher import Teacher, TeacherScorer


@dataclass(frozen=True)
class TeacherOptions(TeacherConfig):
    """The options by which a run has its teacher."""

    def scorer(self) -> "TeacherScorer":
        """Minus the divergence."""
        from dschat_lora.addons.distill.teacher import TeacherScorer

        return TeacherScorer()

    def load(self, *of_run: Any) -> "Teacher":
        """The teacher by config, tokenizer, sources and run; call on every rank."""
        from dschat_lora.addons.distill.teacher import load_teacher

        return load_teacher(self, *of_run)
