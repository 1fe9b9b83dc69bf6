"""Programs of several processes: ``python -m torch.distributed.run ... tests/processes.py SCRIPT ARGUMENTS...``."""

import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

LIMIT = 1200  # seconds; only a deadlock takes that long


def run_two(script, *arguments, **environment):
    """``script`` in two processes over gloo, on the CPU; fails with what they wrote."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [*launch, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def main():
    """Run the script, leave the process group, and end without Python's own shutdown.

    The threads of gloo give back the tensors of finished collectives, for which they need Python. One that asks for it
    after the interpreter has begun to shut down ends in std::terminate (exit code -6), and they cannot be joined: once
    DDP was used, torch holds on to the group after destroy_process_group and after the last DDP object.
    """
    import torch.distributed as dist

    sys.argv, code = sys.argv[1:], 0
    sys.path[0] = str(Path(sys.argv[0]).parent)
    sys.path.append(str(Path(__file__).parents[1]))  # recipes
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
