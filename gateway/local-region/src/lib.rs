//! Starts PostgreSQL, nodes of a region, their agent and a balancer as processes of one machine:
//! for integration tests, load tests and `gw-gateway demo --nodes`. Each process ends with the one
//! that started it.

mod balancer;
mod error;
mod events;
mod folder;
mod node;
mod part;
mod ports;
mod postgres;
mod programs;
mod region;
mod store;

pub use self::balancer::Balancer;
pub use self::error::Error;
pub use self::events::{Event, Events, Sleep, Wait};
pub use self::node::{Node, Place, Settings, is_settled};
pub use self::part::{Part, Starter, become_program, end_with};
pub use self::ports::hold;
pub use self::postgres::{Listen, Server};
pub use self::programs::User;
pub use self::region::{Options, Region};
pub use self::store::without_password;
