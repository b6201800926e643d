"""One way to die each: a real pytest with real engines is brought down, and watched from outside."""
