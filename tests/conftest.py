"""Settings for every test: one torch thread per process, and how Hypothesis searches."""

import atexit
import os
import shutil
import signal
import tempfile

from hypothesis import HealthCheck, settings

# Test workers and the ranks that they start share the cores; torch reads this when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell starts what runs behind it with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A folder of plans of their own, which the workers of one run share.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["CPBENCH_CACHE"] = tempfile.mkdtemp(prefix="cpbench-tests-")
    atexit.register(shutil.rmtree, os.environ["CPBENCH_CACHE"], ignore_errors=True)

settings.register_profile(
    "local",
    deadline=None,  # the first example of a worker pays for imports
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],  # it measures the machine's load, not the test
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.register_profile("thorough", settings.get_profile("local"), max_examples=1000)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")
