//! The console as browsers see it on the wire: who gets in, what is refused, what pages hold and do not hold.

mod access;
mod browser;
mod pages;
mod requests;
