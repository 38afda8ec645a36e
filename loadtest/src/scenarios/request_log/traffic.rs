//! Synthetic records: few statuses, many paths, some with trace ids.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use gw_shared::id::{AgentId, KeyId, RequestId};
use gw_telemetry::request_log::{Batch, CallerId, RequestRecord, Timing};
use http::Method;

/// Generates records, deterministic for the same services.
pub(super) struct Traffic {
    services: Vec<Service>,
    random: u64,
}

struct Service {
    label: Arc<str>,
    agents: [AgentId; 2],
    keys: [KeyId; 4],
}

impl Traffic {
    pub(super) fn new(services: usize) -> Self {
        let service = |number| Service {
            label: label(number).into(),
            agents: [AgentId::random(), AgentId::random()],
            keys: std::array::from_fn(|_| KeyId::random()),
        };
        Self {
            services: (0..services).map(service).collect(),
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Batches of two workers with `count` requests that began within `span_ms` from `begin_ms` on
    /// (Unix time). Services with low numbers have more of them: the first of 200 has about 17 %.
    pub(super) fn batches(&mut self, begin_ms: u64, span_ms: u64, count: usize) -> [Batch; 2] {
        let mut records: Vec<[Vec<RequestRecord>; 2]> =
            vec![[Vec::new(), Vec::new()]; self.services.len()];
        for number in 0..count {
            let spot = self.below(1 << 20) as f64 / f64::from(1 << 20);
            let service = (spot.powi(3) * self.services.len() as f64) as usize;
            let record = self.record(service, begin_ms + span_ms * number as u64 / count as u64);
            records[service][service % 2].push(record);
        }
        let mut batches = [Batch::default(), Batch::default()];
        for (service, records) in self.services.iter().zip(records) {
            for (batch, records) in batches.iter_mut().zip(records) {
                if !records.is_empty() {
                    batch.services.push((Arc::clone(&service.label), records));
                }
            }
        }
        batches
    }

    fn record(&mut self, service: usize, unix_ms: u64) -> RequestRecord {
        let draw = self.next();
        let (status, code) = match draw % 10_000 {
            0..300 => (404, None),
            300..310 => (502, Some("GW_BACKEND_UNREACHABLE")),
            310 => (503, Some("GW_AGENT_UNAVAILABLE")),
            _ => (200, None),
        };
        let item = self.below(100_000);
        let target = if draw & 1 << 40 == 0 {
            format!("/api/v1/items/{item}")
        } else {
            format!("/api/v1/search?q=word{item}&page=2")
        };
        let backend = 800 + self.below(40_000) as u32;
        let id = self.id(unix_ms);
        let Service { agents, keys, .. } = &self.services[service];
        RequestRecord {
            method: if draw & 7 << 41 == 0 {
                Method::POST
            } else {
                Method::GET
            },
            target: target.into(),
            caller: IpAddr::V4(Ipv4Addr::from(0x0a00_0000 | (draw >> 44) as u32 & 0x1ff)),
            by: Some(CallerId::ServiceKey(
                keys[(draw >> 54) as usize % keys.len()].clone(),
            )),
            status: Some(status),
            code,
            bytes_out: 98 + (draw >> 20 & 0xfff),
            timing: Timing {
                authenticate: 40 + (draw >> 30 & 0x1f) as u32,
                wait: Some(10 + (draw >> 35 & 0x1f) as u32),
                agent: Some(3),
                backend_first_byte: Some(backend),
                response_head: Some(backend + 150),
                total: u64::from(backend) + 200 + (draw >> 50 & 0xff),
            },
            agent: Some(agents[draw as usize & 1].clone()),
            trace_id: (draw & 1 << 60 == 0)
                .then(|| (u128::from(draw) << 64 | u128::from(item)).to_be_bytes()),
            ..RequestRecord::example(id)
        }
    }

    /// A UUIDv7 (RFC 9562 §5.7).
    fn id(&mut self, unix_ms: u64) -> RequestId {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&(unix_ms << 16 | 0x7000 | self.below(0x1000)).to_be_bytes());
        bytes[8..].copy_from_slice(&(self.next() >> 2 | 1 << 63).to_be_bytes());
        RequestId::from_bytes(bytes).unwrap_or_else(|| RequestId::first_of_ms(unix_ms))
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 33) % end
    }

    /// The next number of splitmix64.
    pub(super) fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

pub(super) fn label(service: usize) -> String {
    format!("acme--service-{service}")
}
