"""The trigger lab: small attention models of any operation on the trigger task of Ran-Milo 2026; see docs/trigger.md."""
