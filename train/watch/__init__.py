"""What is measured while a run trains: metrics, where time goes, profiles, gradient noise."""
