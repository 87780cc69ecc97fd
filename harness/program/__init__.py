"""Device programs: what each rank's GPU is told, as data that is proved before it runs."""
