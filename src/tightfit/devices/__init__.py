"""Cards as data: the `Device`, the catalogue of known ones, and calibration files that measured figures come from."""
