//! Accounts, services, credentials and keys that documents manage.

mod api;
