"""A scorer of one's own: two rewards by name, of which one is not given to every response."""

import torch


class Style:
    names = ("brevity", "rightness")

    def check_columns(self, columns):
        if "completion" not in columns:
            raise ValueError(f"rightness asks for completion, the data has {sorted(columns)}")

    def __call__(self, responses, state):
        return {
            "brevity": torch.tensor([-float(len(each.text)) for each in responses]),
            "rightness": [
                float(each.row["completion"] in each.text) if each.ended else None
                for each in responses
            ],
        }
