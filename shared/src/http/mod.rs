//! HTTP/1.1 messages (RFC 9112): heads, bodies and fields, without I/O, and checks of HTTP/2
//! messages that the h2 crate leaves to its user. Serves both roles: the gateway reads requests and
//! writes responses, the agent writes requests and reads responses.

pub mod body;
pub mod caller_connection;
mod chunk_extensions;
pub mod connection_auth;
mod field_list;
pub mod fields;
pub mod framing;
pub mod head;
pub mod invalid_head_parts;
mod limits;
pub mod upgrade;
mod version;
pub mod write;

pub use body::{BodyDecoder, InvalidBody, Part};
pub use field_list::Fields;
pub use framing::Framing;
pub use head::{HeadScanner, RequestHead, ResponseHead};
pub use invalid_head_parts::InvalidHeadParts;
pub use limits::{HeadLimits, InvalidHead};
pub use upgrade::UpgradeProtocol;
pub use version::HttpVersion;
pub use write::ConnectionField;
