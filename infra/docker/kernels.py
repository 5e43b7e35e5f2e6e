"""Compiles every C kernel of the given source folders into SS_CACHE_DIR/kernels; the build ends here if one does not compile."""

import sys
from pathlib import Path

from shared.kernels import load_kernel

sources = sorted(source for folder in sys.argv[1:] for source in Path(folder).rglob("*.c"))
failed = [str(source) for source in sources if load_kernel(source) is None]
if failed or not sources:
    sys.exit(f"not compiled: {', '.join(failed) or 'there are no kernels'}")
