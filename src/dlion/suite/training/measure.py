"""``evaluate=RUN``: a stored model is measured as its run has measured it."""

from pathlib import Path

from dlion.exchange import Channel
from dlion.suite import models
from dlion.suite.record.runs import load_run
from dlion.suite.terminal import printable
from dlion.suite.training.console import RunConsole
from dlion.suite.training.evaluation import evaluate
from dlion.suite.training.job import Job
from dlion.suite.training.precision import in_precision
from dlion.suite.training.virtual import VirtualWorkers
from dlion.suite.training.weights import load_weights


def measure(job: Job) -> float | None:
    """Measure the model of the run ``job.config.evaluate`` in this process, as one of its workers.

    The first process prints each result beside the recorded one; with the run's own settings and
    device they are equal to the last digit.

    Returns:
        The test accuracy, or the test loss where there is none.
    """
    config, control = job.config, Channel(job.workers)
    model = in_precision(models.build(config.model, job.data), config.precision, job.device)
    # a mean rounds: this gives constants that are not saved the bits that the run measured with
    VirtualWorkers(model, job.workers, config.seed).load_mean_buffers(control)
    load_weights(model, config.evaluate)
    if job.workers.rank == 0:
        print(f"data: {job.data.describe()}", flush=True)
    watch = RunConsole(0, job.workers.rank == 0).watch
    results = evaluate(model, job.data, control, job.device, config.eval_limit, watch)
    if job.workers.rank == 0:
        run = load_run(Path(config.evaluate).expanduser())
        recorded = {**run.summary, **(run.metrics[-1] if run.metrics else {})}
        found = (
            f"{name} {value} (recorded {recorded.get(name)})" for name, value in results.items()
        )
        print(printable(f"{config.evaluate}: {', '.join(found)}"))
    return results.get("test_accuracy", results["test_loss"])
