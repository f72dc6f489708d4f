"""``cairn.driver.driver``, but the first one that is done kills the task that started it, with -9, before it can hear of the result."""

import os
import signal
import sys
import time
from pathlib import Path

from cairn.driver.driver import main

if __name__ == "__main__":
    code = main()
    mark = Path(os.environ["CAIRN_TALLY"], "killed-once")
    if sys.argv[1] == "interval" and code == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # the kernel ends this process too
    sys.exit(code)
