//! Identity of agents and of the gateway: enrollment, certificates, their authority, versions and
//! updates.

// Once:
mod agent_versions;
mod certificates;
mod enrollment;
mod enrollment_tokens;
mod key_exchange;
mod replaced_keys;
mod replicas;

// Once, slow:
mod acme;
mod agent_ca;
mod agent_updates;
mod own_domains;
