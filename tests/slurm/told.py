"""A rank that only tells how it was started: its words and the variables that it got, as JSON."""

import json
import os
import sys
from pathlib import Path

folder = Path(sys.argv[1])
kept = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
told = {
    name: os.environ.get(name) for name in (*kept, *(name for name in os.environ if name.startswith("OWN_")))
}
folder.mkdir(parents=True, exist_ok=True)
(folder / f"told-{os.environ['RANK']}.json").write_text(json.dumps([sys.argv[2:], told], sort_keys=True))
