"""Training loops of published measurements, rebuilt as workloads. Each function sets up, then yields once per step."""
