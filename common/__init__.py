"""What the scripts share. Scripts import from here; nothing here knows a script.

Importing this package comes before importing torch (the train scripts see to it), because of the one setting below.
"""

import os

# GNU OpenMP's threads wait for each other by spinning. Where another process wants the same core, the default
# (billions of turns) makes a training step many times slower; a few microseconds cost nothing measurable when alone.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
