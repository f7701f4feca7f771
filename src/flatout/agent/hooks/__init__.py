"""The four places where a script meets torch: loader, model, optimizer, step."""
