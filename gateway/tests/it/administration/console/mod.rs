//! The console over HTTP: access control, pages, forms and recorded requests.

mod access;
pub(crate) mod browser;
mod fields;
mod forms;
mod own_domains;
mod own_name;
mod pages;
mod requests;
