"""How a run fits into the machine: what it takes of memory and time, and what is chosen because of that."""
