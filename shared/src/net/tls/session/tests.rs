//! Sessions against rustls' buffered connections, in memory.

mod pair;

use rustls::crypto::cipher::{OutboundChunks, OutboundPlainMessage};
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets,
    InvalidMessage, PeerMisbehaved, ProtocolVersion, SupportedCipherSuite,
};

use self::pair::{Pair, Side, connected, on_each_side_and_version, unconnected};
use super::*;

/// Lengths of the records in `ciphertext`, with their headers.
fn records(mut ciphertext: &[u8]) -> Vec<usize> {
    let mut lengths = Vec::new();
    while !ciphertext.is_empty() {
        let length = 5 + usize::from(u16::from_be_bytes([ciphertext[3], ciphertext[4]]));
        lengths.push(length);
        ciphertext = &ciphertext[length..];
    }
    lengths
}

/// Bytes that do not repeat at the length of a record.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 % 251) as u8).collect()
}

#[test]
fn handshakes_complete_in_inputs_of_every_size_and_in_small_records() {
    on_each_side_and_version(|side, version| {
        for fragment in [None, Some(64)] {
            for size in [1, 2, 3, 4, 5, 6, 7, 30, 100, 1000, usize::MAX] {
                let mut pair = unconnected(side, version, fragment);
                pair.shake_hands(size);
                pair.assert_alive();
            }
        }
    });
}

#[test]
fn records_cut_at_every_place_arrive_whole() {
    on_each_side_and_version(|side, version| {
        let mut pair = connected(side, version);
        let plaintext = pattern(90);
        let length = pair.peer_writes_in(&plaintext, 30).len();
        let mut pair = connected(side, version);
        for cut in 0..=length {
            let ciphertext = pair.peer_writes_in(&plaintext, 30);
            assert_eq!(ciphertext.len(), length);
            let (first, second) = ciphertext.split_at(cut);
            let mut received = pair.receive(first).unwrap();
            let complete = cut / (length / 3) * 30;
            assert_eq!(received.len(), complete, "cut at {cut}");
            // No more is kept than the incomplete record.
            assert!(pair.session.incomplete.capacity() < length / 3);
            received.extend(pair.receive(second).unwrap());
            assert_eq!(received, plaintext);
            pair.assert_no_memory();
        }
        let ciphertext = pair.peer_writes(&plaintext);
        let bytes = ciphertext.chunks(1);
        let received = bytes.flat_map(|byte| pair.receive(byte).unwrap());
        assert!(received.eq(plaintext));
        pair.assert_alive();
    });
}

#[test]
fn one_input_has_many_records_behind_the_rest_of_one() {
    on_each_side_and_version(|side, version| {
        let mut pair = connected(side, version);
        let plaintext = pattern(100_000);
        let ciphertext = pair.peer_writes_in(&plaintext, 97);
        assert_eq!(records(&ciphertext).len(), plaintext.len().div_ceil(97));
        let mut received = pair.receive(&ciphertext[..20]).unwrap();
        let input = &ciphertext[20..ciphertext.len() - 20];
        received.extend(pair.receive(input).unwrap());
        // Only the incomplete record was copied.
        assert!(pair.session.incomplete.capacity() < 200);
        received.extend(pair.receive(&ciphertext[ciphertext.len() - 20..]).unwrap());
        assert!(received == plaintext);
        pair.assert_alive();
    });
}

#[test]
fn full_records_are_received_as_a_socket_delivers_them() {
    on_each_side_and_version(|side, version| {
        let mut pair = connected(side, version);
        let plaintext = pattern(1_000_000);
        let ciphertext = pair.peer_writes(&plaintext);
        let inputs = ciphertext.chunks(65_536);
        let received = inputs.flat_map(|input| pair.receive(input).unwrap());
        assert!(received.eq(plaintext));
        pair.assert_no_memory();
    });
}

#[test]
fn the_pieces_of_a_write_share_records() {
    on_each_side_and_version(|side, version| {
        let mut pair = connected(side, version);
        let head = pattern(150);
        let body = pattern(100);
        assert_eq!(pair.write(&[&head, b"", &body]).unwrap(), 250);
        let lengths = pair.assert_sends(&[&head[..], &body].concat());
        assert_eq!(lengths.len(), 1);

        // Three full records and a smaller one, as rustls divides one piece.
        let body = pattern(3 * FRAGMENT_MAX);
        let written = pair.write(&[&head[..100], &head[100..], &body]).unwrap();
        assert_eq!(written, 150 + body.len());
        let lengths = pair.assert_sends(&[&head[..], &body].concat());
        assert_eq!(lengths.len(), 4);
        let is_full = |length: &usize| *length > FRAGMENT_MAX;
        assert!(lengths[..3].iter().all(is_full), "{lengths:?}");

        // Pieces that end with a record.
        let piece = pattern(FRAGMENT_MAX);
        assert_eq!(pair.write(&[&piece, &piece]).unwrap(), 2 * FRAGMENT_MAX);
        assert_eq!(pair.assert_sends(&piece.repeat(2)).len(), 2);
        pair.assert_no_memory();
    });
}

#[test]
fn a_writer_gets_no_room_beyond_the_bound() {
    on_each_side_and_version(|side, version| {
        let mut pair = connected(side, version);
        let plaintext = pattern(1 << 20);
        assert_eq!(pair.write(&[&plaintext]).unwrap(), SEND_BUFFER);
        assert_eq!(pair.write(&[&plaintext]).unwrap(), 0);
        let overhead = SEND_BUFFER / FRAGMENT_MAX * RECORD_OVERHEAD;
        assert!(pair.session.outgoing.len() <= SEND_BUFFER + overhead);
        assert!(pair.session.outgoing.capacity() <= SEND_BUFFER + overhead + 4 * 1024);

        // Sent in parts that end inside of records.
        let mut sent = Vec::new();
        let mut written = SEND_BUFFER;
        while pair.session.has_unsent() {
            let send = |pieces: &[IoSlice<'_>]| {
                let part = pieces[0].len().min(10_000);
                sent.extend_from_slice(&pieces[0][..part]);
                Ok(part)
            };
            pair.session.send_with(send).unwrap();
            written += pair.write(&[&plaintext[written..]]).unwrap();
            assert!(pair.session.outgoing.len() <= SEND_BUFFER + overhead);
        }
        assert_eq!(written, plaintext.len());
        assert!(pair.peer_receives(&sent).unwrap() == plaintext);
        pair.assert_no_memory();
    });
}

#[test]
fn bytes_that_a_socket_does_not_accept_are_sent_later() {
    on_each_side_and_version(|side, version| {
        let mut pair = connected(side, version);
        pair.write(&[b"later"]).unwrap();
        let refuse = |_: &[IoSlice<'_>]| Err(io::ErrorKind::WouldBlock.into());
        let refused = pair.session.send_with(refuse).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        pair.assert_sends(b"later");
        pair.assert_no_memory();
    });
}

#[test]
fn small_writes_share_memory() {
    on_each_side_and_version(|side, version| {
        let mut pair = connected(side, version);
        for _ in 0..50 {
            assert_eq!(pair.write(&[b"frame"]).unwrap(), 5);
        }
        assert!(pair.session.outgoing.capacity() < 4200);
        pair.assert_sends(&b"frame".repeat(50));
    });
}

#[test]
fn writing_has_to_wait_for_the_handshake() {
    on_each_side_and_version(|side, version| {
        let mut pair = unconnected(side, version, None);
        assert!(pair.session.is_handshaking());
        pair.write(&[b"early"]).unwrap_err();
        pair.session.close();
        pair.shake_hands(usize::MAX);
        pair.assert_alive();
    });
}

#[test]
fn keys_are_updated_when_the_peer_asks_for_it() {
    for side in [Side::Client, Side::Server] {
        let mut pair = connected(side, &rustls::version::TLS13);
        for _ in 0..3 {
            pair.peer.refresh_traffic_keys().unwrap();
            let update = pair.peer_sent();
            assert!(pair.receive(&update).unwrap().is_empty());
            // The session's own update leaves with its next bytes.
            pair.write(&[&pattern(FRAGMENT_MAX)]).unwrap();
            assert_eq!(pair.assert_sends(&pattern(FRAGMENT_MAX)).len(), 2);
            pair.assert_alive();
        }
    }
}

#[test]
fn writes_continue_while_a_session_ticket_is_incomplete() {
    let mut pair = unconnected(Side::Client, &rustls::version::TLS13, Some(32));
    let hello = pair.sent();
    pair.peer_receives(&hello).unwrap();
    let flight = pair.peer_sent();
    pair.receive(&flight).unwrap();
    let finished = pair.sent();
    pair.peer_receives(&finished).unwrap();
    let tickets = pair.peer_sent();
    // Each ticket has several records.
    assert!(records(&tickets).len() > 4);
    for byte in &tickets {
        pair.receive(&[*byte]).unwrap();
        pair.write(&[b"x"]).unwrap();
    }
    pair.assert_sends(&b"x".repeat(tickets.len()));
    pair.assert_alive();
}

#[test]
fn a_bad_record_ends_the_session_with_an_alert() {
    on_each_side_and_version(|side, version| {
        let mut pair = connected(side, version);
        let mut ciphertext = pair.peer_writes(b"genuine");
        let genuine = ciphertext.len();
        ciphertext.extend(pair.peer_writes(b"changed"));
        *ciphertext.last_mut().unwrap() ^= 1;
        ciphertext.extend(pair.peer_writes(b"behind"));
        let mut plaintext = Vec::new();
        let later = pair.peer_writes(b"later");
        let cut = genuine + 7;
        let (first, second) = ciphertext.split_at_mut(cut);
        let mut take = |chunk: &[u8]| plaintext.extend_from_slice(chunk);
        pair.session.receive(first, &mut take).unwrap();
        let received = pair.session.receive(second, &mut take);
        assert_eq!(received, Err(Error::DecryptError));
        assert_eq!(plaintext, b"genuine");

        let alert = pair.sent();
        let error = pair.peer_receives(&alert).unwrap_err();
        assert_eq!(error, Error::AlertReceived(AlertDescription::BadRecordMac));
        // The session stays failed, and sends nothing more.
        assert_eq!(pair.receive(&later), Err(Error::DecryptError));
        let refused = pair.write(&[b"more"]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        pair.session.close();
        assert!(!pair.session.has_unsent() && !pair.session.is_closed_by_peer());
        pair.assert_no_memory();
    });
}

#[test]
fn a_bad_header_ends_the_session_before_its_record() {
    on_each_side_and_version(|side, version| {
        for header in [b"HTTP/", &[23, 3, 3, 0xff, 0xff]] {
            for size in [1, 5] {
                let mut pair = connected(side, version);
                let inputs = header.chunks(size);
                let result = inputs.map(|input| pair.receive(input)).last().unwrap();
                let is_invalid = matches!(result, Err(Error::InvalidMessage(_)));
                assert!(is_invalid, "{result:?}");
                assert!(pair.session.has_unsent(), "an alert");
            }
        }
    });
}

#[test]
fn close_notify_ends_both_directions_once() {
    on_each_side_and_version(|side, version| {
        for is_whole in [true, false] {
            let mut pair = connected(side, version);
            pair.peer.send_close_notify();
            let mut ciphertext = pair.peer_sent();
            let alert = ciphertext.len();
            ciphertext.extend(pair.peer_writes(b"after the end"));
            assert!(ciphertext.len() > alert);
            let size = if is_whole { usize::MAX } else { alert - 1 };
            for input in ciphertext.chunks(size) {
                assert!(pair.receive(input).unwrap().is_empty());
            }
            assert!(pair.session.is_closed_by_peer());
            pair.assert_no_memory();

            // The other direction stays open.
            assert_eq!(pair.write(&[b"answer"]).unwrap(), 6);
            pair.assert_sends(b"answer");
            pair.session.close();
            assert_eq!(pair.assert_sends(b"").len(), 1);
            assert!(pair.peer.process_new_packets().unwrap().peer_has_closed());
            pair.session.close();
            assert!(!pair.session.has_unsent());
            let refused = pair.write(&[b"more"]).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::BrokenPipe);
            pair.assert_no_memory();
        }
    });
}

#[test]
fn a_closed_session_still_receives() {
    on_each_side_and_version(|side, version| {
        let mut pair = connected(side, version);
        pair.session.close();
        let sent = pair.sent();
        pair.peer_receives(&sent).unwrap();
        let ciphertext = pair.peer_writes(b"answer");
        assert_eq!(pair.receive(&ciphertext).unwrap(), b"answer");
        pair.peer.send_close_notify();
        let alert = pair.peer_sent();
        assert!(pair.receive(&alert).unwrap().is_empty());
        assert!(pair.session.is_closed_by_peer());
        pair.assert_no_memory();
    });
}

/// An endless sequence of empty records, which rustls itself does not send, with the keys of a TLS
/// 1.3 connection.
fn empty_records(peer: rustls::Connection) -> impl Iterator<Item = Vec<u8>> {
    let Some(SupportedCipherSuite::Tls13(suite)) = peer.negotiated_cipher_suite() else {
        panic!("not TLS 1.3")
    };
    let ExtractedSecrets {
        tx: (next, secrets),
        ..
    } = peer.dangerous_extract_secrets().unwrap();
    let mut encrypter = match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
            suite.aead_alg.encrypter(key, iv)
        }
        _ => panic!("another cipher suite"),
    };
    let encrypt = move |sequence| {
        let typ = ContentType::ApplicationData;
        let version = ProtocolVersion::TLSv1_2;
        let record = OutboundPlainMessage {
            typ,
            version,
            payload: OutboundChunks::Single(&[]),
        };
        encrypter.encrypt(record, sequence).unwrap().encode()
    };
    // The first record of a key has number 0.
    (0..).map(encrypt).skip(usize::try_from(next).unwrap())
}

#[test]
fn a_flood_of_empty_records_ends_the_session() {
    for side in [Side::Client, Side::Server] {
        let Pair { mut session, peer } = connected(side, &rustls::version::TLS13);
        for (count, mut record) in empty_records(peer).take(33).enumerate() {
            let received = session.receive(&mut record, &mut |chunk| assert!(chunk.is_empty()));
            let expected = match count {
                ..32 => Ok(()),
                _ => Err(PeerMisbehaved::TooManyEmptyFragments.into()),
            };
            assert_eq!(received, expected);
            assert_eq!(session.incomplete.capacity(), 0);
            assert_eq!(session.outgoing.capacity(), 0);
        }
    }
}

#[test]
fn a_flood_of_handshake_fragments_is_bounded() {
    // A ClientHello of 65,535 bytes, one byte per record.
    let message = [1, 0, 0xff, 0xff].into_iter().chain(std::iter::repeat(0));
    let records = message
        .take(4 + 0xffff)
        .flat_map(|byte| [22, 3, 3, 0, 1, byte])
        .collect::<Vec<u8>>();
    for size in [7, 4096, 65_536] {
        let mut pair = unconnected(Side::Server, &rustls::version::TLS13, None);
        let mut failed = None;
        for (count, input) in records.chunks(size).enumerate() {
            if let Err(error) = pair.receive(input) {
                failed = Some((count * size, error));
                break;
            }
            assert!(pair.session.incomplete.capacity() <= 128 * 1024);
        }
        let (received, error) = failed.unwrap();
        assert!(received <= 64 * 1024, "{received} bytes were kept");
        let expected = InvalidMessage::HandshakePayloadTooLarge;
        assert_eq!(error, Error::InvalidMessage(expected));
        pair.assert_no_memory();
    }
}
