"""A dry run: everything checked, the resolved configuration and the first plan written, nothing started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexfloor.history import HistoryStore, LengthHistory
from verl_integration.dataset import identify, read_dataset
from verl_integration.epochs import dataset_order, plan_replicas, steps_per_epoch
from verl_integration.records import plan_file
from verl_integration.section import RunSettings
from verl_integration.verl_checks import check_verl


def write_first_plan(config: Any, run: RunSettings) -> list[Path]:
    """Writes RUN_DIR/verl.yaml, RUN_DIR/config.yaml and the plan of the epoch that training would begin with.

    Raises:
        InputError, RefusedError: the dataset does not fit.
    """
    import yaml
    from omegaconf import OmegaConf

    check_verl(config)
    dataset, tokenizer = read_dataset(config)
    index = identify(dataset, tokenizer, config, run.config)
    epoch, known = _position(run, steps_per_epoch(len(index), run.config.step_prompts))
    order = dataset_order(index.ids, epoch, shuffle=bool(config.data.shuffle), seed=int(config.data.get("seed") or 1))
    plans = plan_replicas(run.config, known, order, run.replicas, epoch)
    folder = Path(run.run_dir)
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    section = folder / "config.yaml"
    section.write_text(yaml.safe_dump({"flexfloor": run.config.resolved()}, sort_keys=False), encoding="utf-8")
    whole = folder / "verl.yaml"
    OmegaConf.save(config, whole, resolve=True)
    written = [section, whole]
    for replica, plan in enumerate(plans):
        file = plan_file(folder, epoch, replica if len(plans) > 1 else None)
        plan.save(file)
        written.append(file)
        ladders = ", ".join("-".join(map(str, step.ladder)) for step in plan.steps)
        print(f"flexfloor: epoch {epoch}, replica {replica}: {len(plan.steps)} steps, ladders {ladders}")
    for file in written:
        print(f"flexfloor: wrote {file}")
    return written


def _position(run: RunSettings, steps: int) -> tuple[int, LengthHistory]:
    """The epoch of the next step and what is known as of its begin."""
    path = Path(run.run_dir) / run.config.history.path
    if not path.exists():
        return 0, LengthHistory()
    with HistoryStore(path) as store:
        epoch = (store.last_step or 0) // steps
        return epoch, store.view(run.config.alpha, as_of=epoch * steps)
