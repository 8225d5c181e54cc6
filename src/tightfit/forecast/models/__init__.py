"""The models of the tournament, one file each, behind `abstract_model.AbstractModel`."""
