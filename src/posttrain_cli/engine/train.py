"""What every training process runs: join, seed, train, leave.

Started by our launcher as `python -m posttrain_cli.engine.train RUN`; under torchrun and the
like `body` is called in the process that is there already.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain_cli.engine.worker import run_worker
from posttrain_cli.runs.directory import RunDirectory

if TYPE_CHECKING:
    from posttrain_cli.engine.distributed import World


def main() -> None:
    """Entry of a launched worker."""
    run_worker(lambda: body(RunDirectory(Path(sys.argv[1]))))


def body(run: RunDirectory, world: World | None = None) -> None:
    """Train the run as its orders say; every rank calls it.

    Args:
        run: the run directory.
        world: the world that was joined before; None joins it.
    """
    from posttrain_cli.engine import distributed, seeds, sft
    from posttrain_cli.engine.task import Task

    quiet_libraries()
    task = Task(run)
    world = world or distributed.join(task.order.gpu)
    main = world.is_main
    seeds.set_seeds(task.config.trainer.seed)
    if task.config.trainer.deterministic:
        seeds.make_deterministic()

    def say(line: str) -> None:
        if main:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    sft.run(task, world, say)
    distributed.shutdown()


def quiet_libraries() -> None:
    """Keep progress bars and advice of libraries out of the logs; errors still come through."""
    import warnings

    from transformers.utils import logging

    for library in ("transformers", "peft"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=library)

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    main()
