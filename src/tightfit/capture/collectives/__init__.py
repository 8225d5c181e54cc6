"""Process groups of a distributed program, of which one process is traced: groups that send nothing, and what its collectives move and hold."""
