"""How threads of matrix products on a CPU wait for one another: import this before torch, whose OpenMP reads it once.

They would spin, and where something else runs beside them, spin away the very time that the thread they wait for needs: a training
step beside one busy process took three times as long. Sleeping instead costs microseconds.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
