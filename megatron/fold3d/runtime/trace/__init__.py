"""Records a rank's iterations in trace files."""
