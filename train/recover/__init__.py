"""How the other processes of a run go on when one is lost, from copies in memory."""
