"""Measures the thresholds that the demonstration verifies by, and keeps them beside it with their evidence.

    python -m demo.calibrate --preset smollm2 [--rollouts 256]

The same as `coordinator calibrate` on the demo's run file. Needed again when the model, vLLM or torch changes: minutes for
the tiny model, half an hour for SmolLM2 on two cores.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from demo.main import prepare_model
from demo.presets import PRESETS, THRESHOLDS, Ports, run_file
from protocol.cli import run_app
from protocol.signing import Identity


def calibrate() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="smollm2", choices=sorted(PRESETS))
    parser.add_argument("--rollouts", type=int, default=256, help="of each engine setting")
    parser.add_argument("--cache", type=Path, default=Path(".cache/models"), help="where the initial models are kept")
    arguments = parser.parse_args()
    from coordinator.calibration import run
    from coordinator.config import load_run_file

    preset = PRESETS[arguments.preset]
    model, eos = prepare_model(preset, arguments.cache.resolve())
    with tempfile.TemporaryDirectory(prefix="calibrate-") as scratch:
        file = Path(scratch) / "run.toml"
        file.write_text(run_file(preset, Ports.free(), model=model, eos=eos, trainer=Identity.from_seed(bytes(32))))
        fitted = run.calibrate(
            load_run_file(file),
            THRESHOLDS / preset.name,
            run.Bound(),
            run.Options(rollouts=arguments.rollouts, kv_cache_gib=0.5),
            lambda line: print(line, flush=True),
        )
    print(f"calibrated on {fitted.calibrated_on}, tried on {fitted.tried_on}: exceeded {fitted.exceeded or 'nothing'}")


if __name__ == "__main__":
    run_app("demo.calibrate", calibrate)
