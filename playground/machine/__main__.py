"""Prints what environment.describe() says, as JSON: for a process that must not initialise CUDA itself."""

import json

from playground.machine import environment

print(json.dumps(environment.describe()))
