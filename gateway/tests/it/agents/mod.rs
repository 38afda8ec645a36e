//! Agents, their tunnels and their backends.

// On each driver:
mod agent_abuse;
mod agent_downloads;
mod agent_errors;
mod agent_http;
mod agent_processes;
mod agent_proxy;
mod agent_responses;
mod tunnel_violations;
mod tunnels;

// On each driver, slow:
mod several_agents;
mod several_agents_attempts;
mod several_agents_limits;
mod several_agents_lost;
