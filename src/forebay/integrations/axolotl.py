"""Forebay in Axolotl: a plugin that its YAML names, and that adds the callback of transformers' `Trainer`.

    plugins:
      - forebay.integrations.axolotl.ForebayPlugin
    forebay_policy: auto
    forebay_budget: 60GiB

Input: the keys of `ForebayArgs`, checked with the rest of the configuration. Output: a `ForebayCallback` in Axolotl's trainer,
which owns what is installed.
"""

from collections.abc import Callable
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field, model_validator

from forebay.integrations.common import manage_arguments
from forebay.integrations.transformers import ForebayCallback


class ForebayArgs(BaseModel):
    """Keys of Axolotl's configuration.

    Attributes:
        forebay_policy: as `policy` of `forebay.manage`; a mapping from patterns on module paths, or one placement, or "auto".
        forebay_budget: with "auto", how far a step's peak may rise over parameters, gradients and optimizer states.
        forebay_options: further options of `ForebayCallback`, such as ``{compile: true}``.
    """

    forebay_policy: str | dict[str, str] = "auto"
    forebay_budget: int | str | None = None
    forebay_options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def check_forebay(self) -> "ForebayArgs":
        """Check the keys when the file is read. Raises for values that suit no model, and for Axolotl's own offloading."""
        manage_arguments("forebay_options", self.forebay_policy, self.forebay_budget, self.forebay_options)
        theirs = getattr(self, "activation_offloading", None)  # of the configuration that these keys are merged into
        if theirs:
            raise ValueError(
                f"activation_offloading: {theirs!r} and ForebayPlugin both move saved tensors to the host: remove one of them"
            )
        return self


class ForebayPlugin(BasePlugin):
    """Puts the model under `forebay.manage` while Axolotl trains; see `ForebayArgs` for its keys."""

    def get_input_args(self) -> str:
        return f"{__name__}.{ForebayArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Callable]:
        """Before the trainer is made: the callback takes its place under what the trainer puts around the model's forward."""
        args = ForebayArgs(**{name: cfg[name] for name in ForebayArgs.model_fields if cfg.get(name) is not None})
        callback: Any = ForebayCallback(args.forebay_policy, args.forebay_budget, **args.forebay_options)
        return [callback]
