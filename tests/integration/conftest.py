import sys
from pathlib import Path

# The small world lives one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
