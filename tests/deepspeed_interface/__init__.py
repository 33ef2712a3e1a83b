"""Not called `deepspeed`: pytest would take the folder for that package, and import it."""
