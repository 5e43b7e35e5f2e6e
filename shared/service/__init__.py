"""The life cycle that all six services share: `Service` to derive from, `main` for a process, `run_service` for tests.

`service` lists the guarantees, `lease` keeps the process's own entry in ss_workers, `process` has signals and exit codes.
"""

from shared.service.life import run_service
from shared.service.process import main
from shared.service.service import Service, mint_instance

__all__ = ["Service", "main", "mint_instance", "run_service"]
