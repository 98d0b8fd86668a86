"""Progress bars: live on a terminal, a line now and then in a file."""

import sys
from functools import partial

from tqdm import tqdm

progress_bar = partial(tqdm, mininterval=0.5 if sys.stderr.isatty() else 15.0)
"""tqdm, with its own arguments."""
