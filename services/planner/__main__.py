"""`python -m services.planner`."""

from services.planner.config import PlannerConfig
from services.planner.service import PlannerService
from shared.service import main

if __name__ == "__main__":
    main(PlannerService, PlannerConfig)
