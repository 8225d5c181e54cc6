"""GPUs as data: the `Device`, the catalogue of known ones, and calibration files with measured figures."""
