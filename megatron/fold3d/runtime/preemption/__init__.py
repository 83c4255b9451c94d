"""PP.sync before DP.sync: one thread that starts a rank's communication."""
